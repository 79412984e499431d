"""What a checkpoint holds, and reading it back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import CheckpointError
from erniekit.manifest import MANIFEST, problems
from erniekit.training.checkpoint import tensors as tensor_files
from erniekit.training.checkpoint.state import (
    CONFIG_FILE,
    TrainerState,
    changed_parameters,
    load_identity,
    load_optimizer,
    load_state,
    save_checkpoint,
    write_config,
)
from erniekit.training.early_stopping import BestSoFar
from erniekit.training.metrics import Totals
from erniekit.training.optim.adamw import build_optimizer, optimizer_state
from tests.training.fakes import FakeModel, identity
from tests.training.test_optimizer import update

STATE = TrainerState(
    step=7,
    epoch=1.25,
    since_log=Totals(0.1 + 0.2, 3.0, {"token_accuracy": 1 / 3}, 11, 0.5),
    whole_run=Totals(2 / 3, 30.0, {"token_accuracy": 7.0}, 110, 5.5),
    best=BestSoFar(5, 1 / 7, 2),
)
CONFIG = {"learning_rate": 0.1, "amp_custom_white_list": ("matmul", "add"), "resume_from_checkpoint": None}


def save(output_dir: Path, model: FakeModel, *, with_optimizer: bool = True) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a checkpoint after one update; the folder and AdamW's state."""
    optimizer = build_optimizer(model.named, TrainingParameters())
    update(model, optimizer, 0)
    folder = save_checkpoint(
        output_dir,
        STATE,
        identity=identity(),
        resolved_config=CONFIG,
        write_model=model.save,
        optimizer=optimizer if with_optimizer else None,
        parameters=model.named,
    )
    return folder, {name: tensor.numpy() for name, tensor in optimizer_state(optimizer, model.named).items()}


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, FakeModel())
    assert folder == tmp_path / "checkpoint-7"
    assert problems(folder, hashes=True) == []
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST,
        "model.safetensors",
        "optimizer.safetensors",
        "run_identity.json",
        "trainer_state.json",
        "training_config.yaml",
    ]


def test_state_and_identity_are_read_back_exactly(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, FakeModel())
    assert load_state(folder) == STATE
    assert load_identity(folder) == identity()


@pytest.mark.parametrize("bytes_a_file", [1 << 30, 1000])
def test_optimizer_state_is_read_back_exactly_from_one_file_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_file: int
) -> None:
    monkeypatch.setattr(tensor_files, "MAX_FILE_BYTES", bytes_a_file)
    folder, state = save(tmp_path, FakeModel())
    files = sorted(path.name for path in folder.glob("optimizer*"))
    assert (len(files) == 1) == (bytes_a_file == 1 << 30)
    assert files[0] in ("optimizer.safetensors", f"optimizer-00001-of-{len(files):05}.safetensors")

    other = FakeModel()
    optimizer = build_optimizer(other.named, TrainingParameters())
    load_optimizer(folder, optimizer, other.named)
    for name, tensor in optimizer_state(optimizer, other.named).items():
        np.testing.assert_array_equal(tensor.numpy(), state[name], err_msg=name)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / f".{CONFIG_FILE}.tmp").mkdir()  # the name under which it is written aside
    with pytest.raises(CheckpointError, match=r"(?s)could not write .*another output_dir"):
        write_config(tmp_path, {})


def test_complete_checkpoints_are_kept_incomplete_ones_replaced(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, FakeModel())
    weights = folder / "model.safetensors"
    written = weights.stat()
    save(tmp_path, FakeModel(seed=4))
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    content = weights.read_bytes()
    weights.write_bytes(bytes(len(content)))
    save(tmp_path, FakeModel())
    assert weights.read_bytes() == content


def test_without_optimizer_state(tmp_path: Path) -> None:
    model = FakeModel()
    folder, _ = save(tmp_path, model, with_optimizer=False)
    assert not list(folder.glob("optimizer*"))
    with pytest.raises(CheckpointError, match=r"has no optimizer state[^\0]*ignore_load_lr_and_optim: true"):
        load_optimizer(folder, build_optimizer(model.named, TrainingParameters()), model.named)


def test_changed_parameters_are_named_with_both_values(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, FakeModel())
    assert changed_parameters(folder, CONFIG) == []
    assert changed_parameters(folder, CONFIG | {"resume_from_checkpoint": True}) == []
    assert changed_parameters(folder, CONFIG | {"learning_rate": 0.2}) == ["learning_rate 0.1 -> 0.2"]


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}', '{"since_log": {}, "whole_run": {}, "surprise": 1}'])
def test_a_state_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trainer_state.json"):
        load_state(tmp_path)


def test_only_json_yaml_and_safetensors(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, FakeModel())
    assert {path.suffix for path in folder.iterdir()} == {".json", ".yaml", ".safetensors"}
    state = json.loads((folder / "trainer_state.json").read_text())
    assert "rng" not in json.dumps(state).lower()


def test_states_of_the_version_with_one_metric_are_read(tmp_path):
    folder, _ = save(tmp_path, FakeModel())
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text())
    state |= {"best_step": 5, "best_eval_loss": 1 / 7}
    del state["best"]
    path.write_text(json.dumps(state))
    (folder / MANIFEST).unlink()
    assert load_state(folder).best == BestSoFar(5, 1 / 7, 0)
