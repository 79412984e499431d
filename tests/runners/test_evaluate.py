"""Evaluation on its own: what keeps it from beginning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import CheckpointError
from erniekit.runners.evaluate import run_evaluation


def test_an_evaluation_on_its_own_is_refused_before_it_begins(
    make_config: Callable[..., Any], records: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    alone = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records)}
    lines: list[str] = []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"output_dir .*/file/out cannot be written"):
        run_evaluation(make_config(**alone, output_dir=str(tmp_path / "file/out")), say=lines.append)
    damaged = train(save_strategy="steps", save_steps=4).output / "checkpoint-4"
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"the checkpoint is not complete: model\.safetensors"):
        run_evaluation(
            make_config(**alone, init_from_checkpoint=str(damaged), continue_training=True), say=lines.append
        )
    assert not any(line.startswith("evaluation at") for line in lines)

    program = "import sys; from pathlib import Path; from erniekit.training.checkpoint_folder import locked\n"
    program += "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(CheckpointError, match="another run is writing"):
            run_evaluation(make_config(**alone), say=lines.append)
    finally:
        other.stdin.close()
        other.stdout.close()
        other.wait()
