"""Tensor and sequence parallelism: the same numbers as one process, whatever is divided."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.cases import layouts
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.distributed

MOE = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused head": {"objective": {"fused_head": True}},
    "whole logits": {"keeps_cut": False},
    "untied": {"model": {"tie_word_embeddings": False}},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "recompute": {"recompute": True, "lora": {"rank": 2, "alpha": 4.0, "dora": True}},
}


def expect_equal(differences: list[dict[str, float]]) -> None:
    for worst in differences:
        assert worst["loss"] < 1e-5 and worst["norm"] < 1e-5 and worst["gradient"] < 1e-5, worst


@pytest.mark.parametrize("sequence", [False, True], ids=["tp2", "tp2+sp"])
@pytest.mark.parametrize("case", CASES)
def test_two_slices_compute_what_one_process_does(case: str, sequence: bool) -> None:
    degrees = {"tensor": 2, "sequence_parallel": sequence}
    expect_equal(run_ranks(layouts.check, 2, world=2, degrees=degrees, **CASES[case]))
