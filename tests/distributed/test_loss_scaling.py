"""The loss scale of float16 on ranks: all of them skip a step that overflows on one, and go on with the same scale."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import loss_scaling
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"degrees": {"tensor": 2}},
    "pipeline": {"degrees": {"pipeline": 2}},
    "data": {"degrees": {}},
    "sharding 1": {"degrees": {"sharding": 2}, "sharding_level": "stage1"},
    "sharding 2": {"degrees": {"sharding": 2}, "sharding_level": "stage2"},
    "sharding 3": {"degrees": {"sharding": 2}, "sharding_level": "stage3"},
}
SOME = ("tensor", "sharding 1")


@pytest.mark.parametrize(
    "layout", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_all_ranks_skip_what_overflows_on_one(layout: str) -> None:
    first, second = run_ranks(loss_scaling.overflow, 2, **LAYOUTS[layout])
    assert first["skipped"] == second["skipped"] and len(first["skipped"]) > 1
    assert first["skipped"] == [loss_scaling.FIRST / 2**number for number in range(len(first["skipped"]))]
    for rank in (first, second):
        assert rank["unchanged"]
        assert rank["loss"][0] == pytest.approx(rank["loss"][1], abs=1e-6)
        assert rank["norm"][0] == pytest.approx(rank["norm"][1], rel=1e-5)
