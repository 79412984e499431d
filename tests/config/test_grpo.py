"""Section 2.14: what stage GRPO refuses and tells before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.samples import load, problems

GRPO: dict[str, Any] = {"stage": "GRPO", "rewards": ["exact_match"]}
EVAL: dict[str, Any] = {**GRPO, "do_train": False, "do_eval": True, "eval_dataset_path": "held-out.jsonl"}


@pytest.mark.parametrize("verb", ["train", "eval"])
@pytest.mark.parametrize(
    ("values", "told"),
    [({"moe_group": "data"}, "their answers differ in length"), ({"pipeline_parallel_degree": 2}, "most of them idle")],
    ids=["experts of data ranks", "pipeline"],
)
def test_layouts_whose_ranks_cannot_answer_alone_are_refused(verb: str, values: dict[str, Any], told: str) -> None:
    assert told in problems(verb, **(GRPO if verb == "train" else EVAL), **values)


@pytest.mark.parametrize("name", ["clip_ratio_low", "clip_ratio_high"])
def test_a_clip_that_no_ratio_reaches_is_told(name: str) -> None:
    told = f"`{name}` (given values) has no effect because a rollout serves one optimizer step"
    assert told in "".join(load(**GRPO, **{name: 0.1}).messages)
    for several in ({"steps_per_generation": 2}, {"num_iterations": 2}):
        assert told not in "".join(load(**GRPO, **several, **{name: 0.1}).messages)


@pytest.mark.parametrize("verb", ["train", "eval"])
@pytest.mark.parametrize("name", ["per_device_eval_batch_size", "max_evaluate_steps"])
def test_sizes_of_evaluation_batches_are_told_to_have_no_effect(verb: str, name: str) -> None:
    values = GRPO | {"do_eval": True, "eval_dataset_path": "held-out.jsonl"} if verb == "train" else EVAL
    assert f"`{name}` (given values) has no effect" in "".join(load(verb, **values, **{name: 7}).messages)


def test_no_reward_has_the_name_of_another_figure() -> None:
    assert "is the deviation within groups" in problems(stage="GRPO", rewards=["std=exact_match"])
