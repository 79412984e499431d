"""Sharding stages 1 to 3 through fleet against one process, what they divide, and going on from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import sharding, sharding_in_16_bits
from tests.distributed.ranks import run_ranks
from tests.model.tiny import EXPERTS

pytestmark = pytest.mark.distributed

WAYS: dict[str, dict[str, Any]] = {
    "stage1": {"sharding": "stage1", "options": {}},
    "stage1 split": {"sharding": "stage1", "options": {"split": True}},
    "stage2": {"sharding": "stage2", "options": {}},
    "stage3": {"sharding": "stage3", "options": {}},
}
MORE_WAYS: dict[str, dict[str, Any]] = {
    "stage1 fused": {"sharding": "stage1", "options": {"fused": True}},
    "stage1 released": {"sharding": "stage1", "options": {"release": True}},
    "stage1 split, released": {"sharding": "stage1", "options": {"split": True, "release": True}},
    "stage2 released": {"sharding": "stage2", "options": {"release": True}},
}
MOE = {**EXPERTS, "moe_num_experts": 5}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "untied": {"tie_word_embeddings": False},
    "recompute": {"recompute": "hooks"},
    "reentrant": {"recompute": "reentrant"},
    "lora": {"lora": "lora"},
    "lora, recompute": {"lora": "lora", "recompute": "reentrant"},
    "dora": {"lora": "dora"},
    "moe": MOE,
    "moe, predictions": {"num_nextn_predict_layers": 2, **MOE},
    "moe, predictions, recompute": {"num_nextn_predict_layers": 2, "recompute": "hooks", **MOE},
    "moe, lora, recompute": {"lora": "lora", "recompute": "hooks", **MOE},
}


def check(ranks: int, degree: int, **run: Any) -> None:
    for differences in run_ranks(sharding.compare, ranks, degree=degree, **run):
        assert differences["loss"] < 1e-6
        assert max(differences[figure] for figure in ("norm", "gradient", "weight")) < 1e-5, differences
        assert (
            differences["state"] < 1e-4
        )  # of moments that are nearly zero after five steps, rounding is a larger part


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_one_process(way: str) -> None:
    """Decaying matrices only and learning rates of layers are part of it: without either, weights differ by 1e-3."""
    check(2, 2, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", MORE_WAYS)
def test_options_change_no_number(way: str) -> None:
    check(2, 2, **MORE_WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [("stage1 split", "lora"), ("stage2", "moe"), ("stage3", "lora, recompute")])
def test_some_kinds_of_training(way: str, kind: str) -> None:
    check(2, 2, **WAYS[way], **KINDS[kind])


@pytest.mark.parametrize("way", ["stage1", pytest.param("stage3", marks=pytest.mark.slow)])
def test_moments_in_files(way: str, tmp_path: Path) -> None:
    check(2, 2, **WAYS[way], moments={"folder": str(tmp_path)})


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["stage1 split", "stage2", "stage1 fused"])
def test_moments_in_files_of_every_stage(way: str, tmp_path: Path) -> None:
    check(2, 2, **{**WAYS, **MORE_WAYS}[way], **KINDS["lora"], moments={"folder": str(tmp_path)})


@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("stage1", {"wide_gradients": True}),
        pytest.param("stage1", {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("stage1 split", {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("stage1 fused", {"micro_batches": 2}, marks=pytest.mark.exhaustive),
        pytest.param("stage2", {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param("stage3", {}, marks=pytest.mark.slow),
    ],
)
def test_float32_copies_of_16_bit_weights_are_divided(way: str, more: dict[str, Any]) -> None:
    """To the bit, with AdamW's GPU kernel as `tests/adamw_kernel.py` has it."""
    run = {**WAYS, **MORE_WAYS}[way]
    assert run_ranks(sharding_in_16_bits.compare, 2, **run, **more) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stage1", "stage2"])
def test_float32_copies_away_from_the_device(way: str, tmp_path: Path) -> None:
    assert run_ranks(sharding_in_16_bits.compare, 2, **WAYS[way], away=str(tmp_path)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["stage1", "stage3"])
def test_moments_in_bfloat16_go_on_from_what_was_saved(way: str) -> None:
    assert run_ranks(sharding.resume, 2, **WAYS[way], degree=2, moments={"bfloat16": True}) == [True, True]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_training(way: str, kind: str) -> None:
    check(2, 2, **WAYS[way], **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [("stage1", "moe"), ("stage3", "lora")])
def test_beside_data_parallelism(way: str, kind: str) -> None:
    check(4, 2, **WAYS[way], **KINDS[kind])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "lora", "moe"])
@pytest.mark.parametrize("way", WAYS)
def test_everything_beside_data_parallelism(way: str, kind: str) -> None:
    check(4, 2, **WAYS[way], **KINDS[kind])


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_three_ranks_by_which_nothing_can_be_divided(way: str) -> None:
    check(3, 3, **WAYS[way])


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", {**WAYS, **MORE_WAYS})
def test_ranks_for_which_nothing_is_left(way: str) -> None:
    """Two trained parameters on three ranks."""
    check(3, 3, lora="one", **{**WAYS, **MORE_WAYS}[way])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora"])
@pytest.mark.parametrize("way", WAYS)
def test_going_on_from_what_was_saved_gives_the_same_bits(way: str, kind: str) -> None:
    assert run_ranks(sharding.resume, 2, **WAYS[way], **KINDS[kind], degree=2) == [True, True]


@pytest.mark.proves("sharding", "sharding_parallel_config")
@pytest.mark.slow
def test_each_stage_divides_what_it_says() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 6}
    sizes["tie_word_embeddings"] = False  # a large tied weight is there from the first to the last layer

    def held(ranks: int, **way: Any) -> list[dict[str, int]]:
        return run_ranks(sharding.held_bytes, ranks, degree=ranks, **way, **sizes)

    (whole,) = held(1, sharding="none", options={})
    gradients = {"gradients", "gradients in passes"}
    divided = {"stage1": {"state"}, "stage1 split": {"state"}, "stage2": {"state", *gradients}, "stage3": set(whole)}
    for way, expected in divided.items():
        for found in held(2, **WAYS[way]):
            parts = {what: found[what] / whole[what] for what in whole}
            assert {what for what, part in parts.items() if part == pytest.approx(0.5, rel=0.12)} == expected, (
                way,
                parts,
            )
            assert all(part == 1.0 for what, part in parts.items() if what not in expected)


@pytest.mark.slow
def test_stage3_divides_frozen_parameters_too() -> None:
    """Also after backward passes; but for the first layer's projections, whose input has no gradient to wait for."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_hidden_layers": 4, "lora": "lora"}
    (whole,) = run_ranks(sharding.held_bytes, 1, degree=1, sharding="none", options={}, **sizes)
    for found in run_ranks(sharding.held_bytes, 2, degree=2, sharding="stage3", options={}, **sizes):
        assert found["parameters"] < 0.6 * whole["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_whose_gradient_is_not_finite_are_named(way: str) -> None:
    """By all ranks where gradients are added up in the backward pass, so that only their sum is known."""
    alone = way.startswith("stage1")
    assert run_ranks(sharding.not_finite, 2, degree=2, **WAYS[way]) == [[] if alone else [2], [2]]
