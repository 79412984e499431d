"""Whole runs, in one process and on two ranks, that are told what to do through `output_dir/control`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.config import Config

ROOT = Path(__file__).parents[2]


def tell(process: subprocess.Popen, output: Path, *lines: str) -> None:
    """Write to the control file once the run has made a step."""
    log = output / "training_log.jsonl"
    while not (log.is_file() and "loss" in log.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    (output / "control").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_run_obeys_saves_and_stops(make_config: Callable[..., Config], ranks: int) -> None:
    config = make_config(max_steps=100_000)
    output = Path(config.basic.output_dir)
    command = [sys.executable, "-m", "erniekit", "train", str(config.path), "--nproc", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL
    )
    try:
        tell(process, output, "status", "lr 3e-3", "nonsense", "quit")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "status: " in said and "lr: step " in said and "'nonsense' is not a command" in said
    (checkpoint,) = output.glob("checkpoint-*")
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["learning_rate"] == 3e-3
    assert f"stopped after step {state['step']}; continue with resume_from_checkpoint=true" in said
    assert not (output / "control").exists() and not (output / "model.safetensors").exists()
