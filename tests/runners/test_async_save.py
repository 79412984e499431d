"""Whole runs whose checkpoints are written beside training: the same checkpoints, and the same ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from erniekit.config import Config
from erniekit.errors import CheckpointError
from erniekit.manifest import MANIFEST, problems
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders, newest_complete, step_of

ROOT = Path(__file__).parents[2]
Train = Callable[..., Any]
OnRanks = Callable[..., SimpleNamespace]
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
ASYNC_SAVE = {**SAVING, "unified_checkpoint_config": "async_save"}


def steps_of(output: Path) -> list[int]:
    return [step_of(folder) for folder in checkpoint_folders(output)]


def same_files(one: Path, other: Path) -> None:
    """But for the configuration and the seconds that the run took."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.safetensors")) != []
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.proves("unified_checkpoint_config")
def test_checkpoints_are_those_of_a_run_that_waits(train: Train, tmp_path: Path) -> None:
    synchronous = train(**SAVING, output_dir=str(tmp_path / "waits"))
    asynchronous = train(**ASYNC_SAVE)
    assert asynchronous.losses == synchronous.losses
    for step in (2, 4):
        folder = asynchronous.output / f"checkpoint-{step}"
        assert problems(folder, hashes=True) == []
        same_files(folder, synchronous.output / f"checkpoint-{step}")
    np.testing.assert_equal(*(load_file(run.output / "model.safetensors") for run in (asynchronous, synchronous)))
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "away")
    again = train(**ASYNC_SAVE, resume_from_checkpoint=True)
    assert again.losses == synchronous.losses
    same_files(again.output / "checkpoint-4", tmp_path / "away")
    assert not list(again.output.glob(".writing*"))


def test_parts_that_ranks_write_are_hashed_and_synced_beside_training(train: Train, tmp_path: Path) -> None:
    parts = {"unified_checkpoint": False}
    synchronous = train(**SAVING, **parts, output_dir=str(tmp_path / "waits"))
    asynchronous = train(**ASYNC_SAVE, **parts)
    assert asynchronous.losses == synchronous.losses
    folder = asynchronous.output / "checkpoint-4"
    assert problems(folder, hashes=True) == []
    same_files(folder, synchronous.output / "checkpoint-4")
    assert not (folder / "rank-00000" / MANIFEST).exists()  # the list of the whole folder is that of the writer
    assert (synchronous.output / "checkpoint-4" / "rank-00000" / MANIFEST).exists()


def test_the_best_stays_and_older_ones_go(train: Train, records: Path) -> None:
    measured = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 1, "load_best_model_at_end": True}
    measured |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is the best
    run = train(**{**ASYNC_SAVE, "save_steps": 1}, **measured, save_total_limit=2)
    assert steps_of(run.output) == [1, 4]
    assert "saved the model of step 1" in run.said
    best = run.output / "checkpoint-1" / "model.safetensors"
    assert (run.output / "model.safetensors").read_bytes() == best.read_bytes()


def test_an_unwritable_folder_ends_the_run_and_keeps_the_earlier_one(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from erniekit.training.checkpoint.async_save import AsyncSaver

    run = train(**{**SAVING, "max_steps": 2})
    start = AsyncSaver._start

    def blocked(self: AsyncSaver, target: Path, staging: Any) -> None:
        (target.parent / f".writing-{target.name}").symlink_to("/proc/nowhere")  # which cannot be made
        start(self, target, staging)

    monkeypatch.setattr(AsyncSaver, "_start", blocked)
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint-4: [^\0]*Earlier checkpoints"):
        train(**ASYNC_SAVE, resume_from_checkpoint=True)
    assert newest_complete(run.output)[0] == run.output / "checkpoint-2"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_degree": 2},
        pytest.param({"tensor_parallel_degree": 2, "unified_checkpoint": False}, marks=pytest.mark.exhaustive),
    ],
    ids=["whole", "parts of ranks"],
)
def test_on_ranks(train_on_ranks: OnRanks, layout: dict[str, Any], tmp_path: Path) -> None:
    synchronous = train_on_ranks(**layout, **SAVING)
    synchronous.output.rename(tmp_path / "waits")
    asynchronous = train_on_ranks(**layout, **ASYNC_SAVE)
    assert asynchronous.losses == synchronous.losses
    for step in (2, 4):
        folder = asynchronous.output / f"checkpoint-{step}"
        assert problems(folder, hashes=True) == []
        same_files(folder, tmp_path / "waits" / f"checkpoint-{step}")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "unified"),
    [
        ("async_save", True),
        *(
            pytest.param(*values, marks=pytest.mark.exhaustive)
            for values in [("", True), ("", False), ("async_save", False)]
        ),
    ],
)
def test_a_full_disk_ends_all_ranks_and_leaves_the_earlier_checkpoint(
    train_on_ranks: OnRanks, make_config: Callable[..., Config], words: str, unified: bool
) -> None:
    """No file may become larger than half of the weights, which is what a full disk is to a process."""
    values = {**SAVING, "tensor_parallel_degree": 2, "unified_checkpoint": unified}
    first = train_on_ranks(**{**values, "max_steps": 2})
    largest = max(path.stat().st_size for path in (first.output / "checkpoint-2").rglob("*.safetensors"))
    values |= {"unified_checkpoint_config": words, "output_dir": str(first.output), "resume_from_checkpoint": True}
    config = make_config(**values)
    command = f'ulimit -f {largest // 2048}; exec "$@"'
    run = subprocess.run(
        ["bash", "-c", command, "-", sys.executable, "-m", "erniekit", "train", str(config.path), "--nproc", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    said = run.stdout + run.stderr
    assert run.returncode != 0
    assert "File too large" in said and "Traceback" not in said
    if unified:
        assert "checkpoint-4" in said and "Earlier checkpoints are unchanged" in said
    assert newest_complete(first.output)[0] == first.output / "checkpoint-2"
    assert steps_of(first.output) == [2] and not list(first.output.glob(".writing*"))
