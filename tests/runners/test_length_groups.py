"""Runs on batches of similar length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = {"batch_tokens": 256, "gradient_accumulation_steps": 2, "curriculum": "length", "max_steps": 6}


def test_a_resumed_run_is_the_uninterrupted_one(train: Callable[..., Any]) -> None:
    straight = train(**GROUPS, lr_scheduler_type="constant")
    weights = (straight.output / "model.safetensors").read_bytes()
    train(**{**GROUPS, "max_steps": 3}, lr_scheduler_type="constant", save_strategy="steps", save_steps=3)
    resumed = train(**GROUPS, lr_scheduler_type="constant", resume_from_checkpoint=True)
    assert resumed.losses == straight.losses and resumed.result.step == 6
    assert (resumed.output / "model.safetensors").read_bytes() == weights


def test_evaluation_gives_the_loss_of_packs(train: Callable[..., Any], records: Path) -> None:
    values = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 4, "max_evaluate_steps": -1}
    values |= {"learning_rate": 1e-9}
    packed = train(**values).result.evaluation.loss
    assert train(**values, batch_tokens=256).result.evaluation.loss == pytest.approx(packed, rel=1e-5)


def test_pairs_are_grouped_too(train: Callable[..., Any], tiny_base: Path) -> None:
    run = train(
        stage="DPO", model_name_or_path=str(tiny_base), continue_training=True, batch_tokens=512, max_seq_len=512,
        train_dataset_path=str(ROOT / "examples/data/preference-train.jsonl"),
    )  # fmt: skip
    assert len(run.losses) == 4 and "of similar length" in run.said
