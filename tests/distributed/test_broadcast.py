"""Arrays from one rank to the others of its group."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.distributed.broadcast import broadcast_arrays
from tests.distributed.cases import broadcast
from tests.distributed.ranks import run_ranks


@pytest.mark.distributed
def test_the_others_of_a_group_have_what_its_first_rank_has() -> None:
    assert run_ranks(broadcast.broadcast_in_two_groups, 4) == [[6, 6, 6]] * 4


def test_a_rank_alone_keeps_what_it_has() -> None:
    metadata, (array,) = broadcast_arrays({"a": 1}, [np.arange(3)], None)
    assert metadata == {"a": 1} and array.tolist() == [0, 1, 2]
