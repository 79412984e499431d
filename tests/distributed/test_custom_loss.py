"""A loss and an array that the package does not know train on every layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases.custom_loss import compare
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("degrees", "features"),
    [({}, False), ({"pipeline": 2}, False), ({"pipeline": 2}, True)],
    ids=["dp2", "pp2", "pp2, features"],
)
def test_a_third_kind_of_loss_has_the_gradients_of_one_process(degrees: dict[str, Any], features: bool) -> None:
    found = run_ranks(compare, 2, timeout=60, world=2, degrees=degrees, features=features)
    for rank in found:
        assert max(rank["gradients"].values()) < 1e-5, rank["gradients"]
        assert max(rank["metrics"].values()) < 1e-5, rank["metrics"]
        assert set(rank["metrics"]) == {"loss", "norm", "z_loss", "eval_loss_sum"}
    assert {name for rank in found for name in rank["gradients"]} == set(found[0]["all"])
