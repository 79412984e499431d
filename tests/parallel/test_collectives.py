"""Collectives, groups and waiting on real ranks."""

from __future__ import annotations

import pytest

from tests.parallel.cases import collectives
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("count", [2, 4])
def test_every_collective_gives_what_numpy_gives(count: int) -> None:
    checked = run_ranks(collectives.check_all, count)
    assert checked == [checked[0]] * count and len(checked[0]) == 10
