"""Runs that go on from a checkpoint on other ranks, or with a step divided in another way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.errors import CheckpointError

ROOT = Path(__file__).parents[2]
Train = Callable[..., Any]
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def test_a_step_may_be_divided_into_other_micro_batches(train: Train) -> None:
    first = train(**SAVING, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    shutil.rmtree(first.output / "checkpoint-4")
    again = train(**SAVING, per_device_train_batch_size=4, gradient_accumulation_steps=1, resume_from_checkpoint=True)
    np.testing.assert_allclose(again.losses, first.losses, atol=1e-5)
    assert "the samples of each step are the same, in micro-batches of 4 rows now, not of 1" in again.said
    with pytest.raises(CheckpointError, match="the remaining steps would train on other samples"):
        train(**SAVING, per_device_train_batch_size=2, resume_from_checkpoint=True)


@pytest.mark.proves("cpu_kernels")
def test_a_run_goes_on_bit_for_bit_on_its_path_of_kernels_only(train: Train, native_path: str) -> None:
    first = train(**SAVING, cpu_kernels=native_path)
    shutil.rmtree(first.output / "checkpoint-4")
    same = train(**SAVING, cpu_kernels=native_path, resume_from_checkpoint=True)
    assert same.losses[-2:] == first.losses[-2:] and "bit-exact" not in same.said
    assert f"; kernels: {native_path} (" in same.said
    shutil.rmtree(first.output / "checkpoint-4")
    other = train(**SAVING, cpu_kernels="paddle", resume_from_checkpoint=True)
    assert f"resuming is not bit-exact: cpu_kernels was {native_path}, is paddle" in other.said
    np.testing.assert_allclose(other.losses, same.losses, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "divided",
    [
        {"tensor_parallel_degree": 2},
        pytest.param({"pipeline_parallel_degree": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"sharding_parallel_degree": 2, "sharding": "stage3", "gradient_accumulation_steps": 1},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_reference_that_follows_is_divided_as_the_adapters_are(
    train: Train,
    train_on_ranks: Callable[..., SimpleNamespace],
    tiny_base: Path,
    tmp_path: Path,
    divided: dict[str, Any],
) -> None:
    """From one process to ranks, and on: each takes its part of the earlier adapters."""
    parameters = {
        **SAVING, "stage": "DPO", "model_name_or_path": str(tiny_base), "continue_training": True, "lora": True,
        "lora_rank": 4, "ref_model_update_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
        "train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"),
    }  # fmt: skip
    alone = train(**parameters)
    checkpoint = str(alone.output / "checkpoint-2")
    ranks = train_on_ranks(**{**parameters, **divided}, resume_from_checkpoint=checkpoint)
    np.testing.assert_allclose(ranks.losses, alone.losses[2:], atol=1e-5)
