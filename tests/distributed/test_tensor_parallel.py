"""Tensor and sequence parallelism: the same numbers as one process, whatever is divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.distributed.cases import layouts
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

DROPOUT = "dropout of hidden states"
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused head": {"objective": {"fused_head": True}},
    "whole logits": {"parallel_output": False},
    "untied": {"model": {"tie_word_embeddings": False}},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "sums in backward": {"sum_in_backward": True, "lora": {"rank": 2, "alpha": 4.0}},
    "sums in backward, all weights": {"sum_in_backward": True, "recompute": True},
    "nothing copied": {"skip_c_identity": True},
    "qwen3": {"model": {"model_type": "qwen3"}, "sum_in_backward": True},
    "qwen2": {"model": {"model_type": "qwen2"}},
    # norms of divided channels; a linear that ranks have whole and use in part; projections to latents; sinks
    "olmo2": {"model": {"model_type": "olmo2"}},
    "glm4": {"model": {"model_type": "glm4", "head_dim": 8}},
    "glm4, lora": {"model": {"model_type": "glm4", "head_dim": 8}, "lora": {"rank": 2, "alpha": 4.0}},
    "deepseek_v3": {"model": {"model_type": "deepseek_v3", "num_hidden_layers": 1}},
    "gpt_oss": {"model": {"model_type": "gpt_oss"}},
    "recompute": {"recompute": True, "lora": {"rank": 2, "alpha": 4.0, "dora": True}},
}


NORM_TOLERANCE = {"olmo2": 5e-3}  # norms after branches enlarge the rounding of small branches


def expect_equal(ranks: list[dict[str, dict[str, float]]], case: str) -> None:
    for worst in (of_rank[case] for of_rank in ranks):
        # AdamW enlarges the rounding of gradients near zero, which later norms show
        assert worst["loss"] < 1e-5 and worst["gradient"] < 1e-5 and worst["norm"] < NORM_TOLERANCE.get(case, 5e-4), (
            worst
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of what one process computes, once for all layouts."""
    return str(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def found(results: str) -> Callable[[bool], list[dict[str, dict[str, float]]]]:
    """What two ranks have found of all cases, without the sequence divided or with it; one job for each."""

    @cache
    def run(sequence: bool) -> list[dict[str, dict[str, float]]]:
        degrees = {"tensor": 2, "sequence_parallel": sequence}
        cases = CASES if sequence else {**CASES, DROPOUT: {"hidden_dropout": 0.3}}
        return run_ranks(layouts.check_all, 2, world=2, degrees=degrees, cases=cases, results=results)

    return run


@pytest.mark.parametrize("sequence", [False, True], ids=["tp2", "tp2+sp"])
@pytest.mark.parametrize("case", CASES)
def test_two_slices_compute_what_one_process_does(
    case: str, sequence: bool, found: Callable[[bool], list[dict[str, dict[str, float]]]]
) -> None:
    expect_equal(found(sequence), case)


@pytest.mark.parametrize("words", [[], ["sync_grad"], ["sync_param"], ["sync_moment"]])
def test_copies_that_have_drifted_apart_are_made_equal(words: list[str]) -> None:
    first, second = run_ranks(layouts.keep_copies_equal, 2, words=words)
    for what, values in second.items():
        assert (values == first[what]) == (what in words), what
    assert second["slice"] == [2.0, 2.0]


def test_four_slices_compute_what_one_process_does(results: str) -> None:
    cases = {"four": {"model": {"num_attention_heads": 4, "num_key_value_heads": 4}}}
    degrees = {"tensor": 4, "sequence_parallel": True}
    expect_equal(run_ranks(layouts.check_all, 4, world=4, degrees=degrees, cases=cases, results=results), "four")


def test_slices_beside_other_samples(results: str) -> None:
    degrees = {"tensor": 2, "sequence_parallel": True}
    cases: dict[str, dict[str, Any]] = {"plain": {}}
    expect_equal(run_ranks(layouts.check_all, 4, world=4, degrees=degrees, cases=cases, results=results), "plain")


@pytest.mark.parametrize("sequence", [False, True], ids=["tp2", "tp2+sp"])
def test_slices_answer_as_one_process_does(sequence: bool) -> None:
    degrees = {"tensor": 2, "sequence_parallel": sequence}
    first, second = run_ranks(layouts.answer, 2, degrees=degrees, model={"initializer_range": 0.5})
    assert first == second and all(first)


def test_ranks_that_have_the_same_hidden_states_drop_the_same_of_them(
    found: Callable[[bool], list[dict[str, dict[str, float]]]],
) -> None:
    expect_equal(found(False), DROPOUT)


@pytest.mark.parametrize("sequence", [False, True], ids=["tp2", "tp2+sp"])
def test_what_ranks_divide_is_dropped_independently(sequence: bool) -> None:
    first, second = run_ranks(layouts.draw_masks, 2, degrees={"tensor": 2, "sequence_parallel": sequence})
    assert first["ATTENTION_PROBABILITIES"] != second["ATTENTION_PROBABILITIES"]  # of other heads
    for site in ("ATTENTION_OUTPUT", "MLP_OUTPUT"):  # of the same tokens, or of others
        assert (first[site] != second[site]) == sequence
