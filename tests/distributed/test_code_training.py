"""Models that speak on every kind of layout: losses, metrics and weights are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import codes
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

CASES: dict[str, dict[str, Any]] = {
    "masked": {"objective": "masked", "weight_decay": 0.1},
    "ar_nar": {"objective": "ar_nar"},
    "masked, fused": {"objective": "masked", "fused": True, "recompute": True},
    "ar_nar, fused": {"objective": "ar_nar", "fused": True, "recompute": True},
    "frozen tables": {"objective": "masked", "freeze_config": "freeze_audio"},
    "adapters": {"objective": "ar_nar", "lora": True},
}
TENSOR, PIPELINE = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": TENSOR,
    "tp2 + sp": {**TENSOR, "sequence_parallel": True},
    "pp2": PIPELINE,
    "sharding1": {"sharding_parallel_degree": 2, "sharding": "stage1"},
    "sharding2": {"sharding_parallel_degree": 2, "sharding": "stage2"},
    "sharding3": {"sharding_parallel_degree": 2, "sharding": "stage3"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "tp2 x pp2 + sp": {**TENSOR, **PIPELINE, "sequence_parallel": True},
    "tp2 x sharding1": {**TENSOR, **LAYOUTS["sharding1"]},
    "pp2 x dp2": {**PIPELINE},
}
SHORT = dict.fromkeys(("dp2", "tp2 + sp", "pp2", "sharding3"), ("masked", "ar_nar"))


def check(layout: str, cases: tuple[str, ...]) -> None:
    chosen = {name: CASES[name] for name in cases}
    world, degrees = (2, LAYOUTS[layout]) if layout in LAYOUTS else (4, ON_FOUR[layout])
    for found in run_ranks(codes.compare_all, world, timeout=300, world=world, degrees=degrees, cases=chosen):
        assert found.keys() == chosen.keys()
        for name, differences in found.items():
            assert max(differences["loss"], differences["weight"]) < 1e-9, (name, differences)
            assert differences["moved"] > 0, name


@pytest.mark.parametrize("layout", SHORT)
def test_a_layout_gives_the_numbers_of_one_process(layout: str) -> None:
    check(layout, SHORT[layout])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [each if each == "tp2 + sp" else pytest.param(each, marks=pytest.mark.exhaustive) for each in LAYOUTS]
)
def test_every_other_way_of_training_on_every_layout(layout: str) -> None:
    check(layout, tuple(name for name in CASES if name not in SHORT.get(layout, ())))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ON_FOUR)
def test_layouts_of_four_ranks(layout: str) -> None:
    check(layout, tuple(CASES))
