"""`kill -9` at random moments, saving included, always leaves a folder from which the run goes on to the same end."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.training.callbacks.log_file import read_log
from erniekit.training.checkpoint_folder import newest_complete, remove_leftovers, step_of

KILLS = 20
MAX_STEPS = 100  # so many that twenty kills come before the end

# `erniekit train` that also prints a line at every operation on its output folder, so that a kill can fall into saving.
PROGRAM = """
import os, sys
def announced(name):
    operation = getattr(os, name)
    def call(*arguments, **options):
        print("disk", name, flush=True)
        return operation(*arguments, **options)
    setattr(os, name, call)
for name in ("fsync", "rename", "replace"):
    announced(name)
from erniekit.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(output_dir: Path) -> list[str]:
    settings = {
        "output_dir": output_dir,
        "data_cache_dir": output_dir.parent / "cache",
        "train_dataset_path": "examples/data/sft-eval.jsonl",
        "max_steps": MAX_STEPS,
        "max_seq_len": 96,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "logging_steps": 1,
        "eval_steps": 5,
        "max_evaluate_steps": 1,
        "save_steps": 2,
        "save_total_limit": 2,
        "warmup_steps": 4,
        "report_to": "none",
        "overwrite_output_dir": "false",
        "resume_from_checkpoint": "true",
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-c", PROGRAM, "train", "examples/configs/quickstart/sft.yaml", *overrides]


def run_and_kill(output_dir: Path, after_lines: int) -> bool:
    """Start the run and kill it when it has printed so many lines of progress. Whether it was still running."""
    process = subprocess.Popen(
        command(output_dir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    seen, lines = 0, []
    for line in process.stdout:
        lines.append(line)
        seen += line.startswith(("disk", "step ", "saved", "evaluation", "resuming"))
        if seen == after_lines:
            process.kill()
    code = process.wait()
    assert code in (0, -9), "".join(lines[-30:])
    return code == -9


def half_written(output_dir: Path) -> list[Path]:
    """What is left of a save, or of a removal after it, that did not come to its end."""
    return [*output_dir.glob(".writing-*"), *output_dir.glob(".deleting-*")]


def comparable_log(output_dir: Path) -> list[dict]:
    timed = ("tokens_per_second", "eval_seconds")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in read_log(output_dir / "training_log.jsonl")
    ]


@pytest.mark.slow
def test_twenty_kills_and_the_same_model_in_the_end(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert not run_and_kill(whole, after_lines=-1)
    moments = random.Random(20)
    newest_step = during_save = 0
    for _ in range(KILLS):
        assert run_and_kill(killed, after_lines=moments.randint(1, 60)), "the run came to its end before all kills"
        during_save += bool(half_written(killed))
        newest, skipped = newest_complete(killed)
        assert skipped == []
        assert step_of(newest) >= newest_step if newest else newest_step == 0
        newest_step = step_of(newest) if newest else 0
    assert newest_step > 0
    assert during_save >= 3
    assert not run_and_kill(killed, after_lines=-1)
    assert remove_leftovers(killed) == []
    assert comparable_log(killed) == comparable_log(whole)
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
