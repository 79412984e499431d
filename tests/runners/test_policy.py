"""Runs of stage GRPO: they answer prompts, score the answers, and learn from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROMPTS = [("What is 1 + 2?", "3"), ("Reverse a b.", "b a"), ("Sort 3, 1.", "1, 3"), ("What is 2 + 2?", "4")]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [{"prompt": question, "answer": answer} for question, answer in PROMPTS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def answer_prompts(train: Callable[..., Any], tiny_base: Path, prompts: Path) -> Callable[..., Any]:
    """A short run: two prompts a rollout, four answers each, rewarded for being short."""

    def run(**parameters: Any) -> Any:
        values = {
            "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True,
            "train_dataset_path": str(prompts), "rewards": ["length:1-12"], "num_generations": 4,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_len": 8,
            "learning_rate": 1e-3, "max_steps": 4,
        }  # fmt: skip
        return train(**{**values, **parameters})

    return run


def rollouts(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_answer_is_kept_with_its_rewards_and_weights(answer_prompts: Callable[..., Any]) -> None:
    run = answer_prompts()
    answers = rollouts(run.output)
    assert len(answers) == 4 * 8 and [answer["rollout"] for answer in answers[::8]] == [0, 1, 2, 3]
    assert len({answer["weights"] for answer in answers}) == 4  # each rollout has weights of its own
    first = answers[:4]
    assert len({answer["place"] for answer in first}) == 1
    rewards = np.array([answer["rewards"]["length"] for answer in first])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([answer["advantage"] for answer in first], expected, atol=1e-4)
    assert run.log[0]["reward"] == pytest.approx(np.mean([answer["reward"] for answer in answers[:8]]), abs=1e-5)
    assert run.log[0]["completion_len"] == pytest.approx(np.mean([answer["tokens"] for answer in answers[:8]]))
    assert run.log[0]["sampling_gap"] < 1e-3


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"])
def test_every_loss_trains(answer_prompts: Callable[..., Any], loss: str) -> None:
    run = answer_prompts(loss_type=loss, max_steps=3, beta=0.05, steps_per_generation=2, num_iterations=2)
    assert all(np.isfinite(record["grad_norm"]) for record in run.log if "loss" in record)
    assert run.log[0]["kl"] == pytest.approx(0.0, abs=1e-6) and "kl" in run.log[2]
