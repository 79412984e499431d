"""Decoders of experts on ranks, trained by the step of the product, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import expert_training
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# The norm that clips is in float32, so the weights have its rounding after the first update.
MAY_DIFFER = {"losses": 1e-8, "norms": 1e-6, "figures": 1e-6, "weights": 1e-8}
ALL = {"rank": 2, "alpha": 4.0}
SOME = {**ALL, "target_modules": ("*.experts.0.*",)}  # which only one rank has
RUNS: list[dict[str, Any]] = [
    {},
    {"gather": True, "recompute": "hooks"},
    {"padded": True, "recompute": "PyLayer"},
    {"lora": ALL, "recompute": "hooks"},
    {"gather": True, "padded": True, "lora": SOME, "recompute": "PyLayer"},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "every rank has all experts": {"tensor": 2},
    "every rank has all experts, sequence": {"tensor": 2, "sequence_parallel": True},
    "mp": {"tensor": 2, "expert_axis": "tensor"},
    "mp, sequence": {"tensor": 2, "sequence_parallel": True, "expert_axis": "tensor"},
    "data": {"data": 2, "expert_axis": "data"},
    "data beside tensor": {"data": 2, "tensor": 2, "expert_axis": "data"},
    "mp beside data, sequence": {"data": 2, "tensor": 2, "sequence_parallel": True, "expert_axis": "tensor"},
}

IN_THE_PLAIN_RUN = ("data", "mp beside data, sequence")  # they hold each part of the others


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of what one process computes, once for all layouts."""
    return str(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in IN_THE_PLAIN_RUN)) for name in LAYOUTS]
)
def test_ranks_that_divide_experts_train_the_same_model(layout: str, results: str) -> None:
    degrees = LAYOUTS[layout]
    count = degrees.get("tensor", 1) * degrees.get("data", 1)
    for differences in run_ranks(expert_training.compare, count, degrees=degrees, runs=RUNS, results=results):
        for run, worst in zip(RUNS, differences, strict=True):
            too_large = {name: worst[name] for name, limit in MAY_DIFFER.items() if not worst[name] < limit}
            assert not too_large, (layout, run, worst)
