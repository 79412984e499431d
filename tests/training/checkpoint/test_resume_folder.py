"""Where a run starts, and what it refuses to overwrite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from erniekit.errors import CheckpointError, ModelFileError
from erniekit.manifest import MANIFEST
from erniekit.model.storage.model_folder import PUBLISHING
from erniekit.training.checkpoint.atomic_folder import publish_files, write_folder
from erniekit.training.checkpoint.resume import Start, open_output_folder, remove_superseded


def write(folder: Path) -> None:
    (folder / "model.safetensors").write_text("weights")


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    """An output folder with checkpoints 1 and 2."""
    folder = tmp_path / "run"
    for step in (1, 2):
        write_folder(folder / f"checkpoint-{step}", write)
    return folder


def start_in(output_dir: Path, **options: object) -> Start:
    arguments = {"resume_from_checkpoint": None, "overwrite_output_dir": False} | options
    with open_output_folder(output_dir, **arguments) as start:
        return start


def test_a_fresh_folder(tmp_path: Path) -> None:
    assert start_in(tmp_path / "new") == Start(None)
    assert (tmp_path / "new").is_dir()


def test_checkpoints_of_an_earlier_run_are_protected(output_dir: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        start_in(output_dir)
    for words in (
        "checkpoint-1, checkpoint-2",
        "resume_from_checkpoint: true",
        "overwrite_output_dir: true",
        "another",
    ):
        assert words in str(caught.value)


def test_a_finished_model_is_protected(tmp_path: Path) -> None:
    publish_files(tmp_path, write)
    with pytest.raises(CheckpointError, match=r"already contains a trained model\.\n  Set overwrite_output_dir: true"):
        start_in(tmp_path)


def test_overwriting_removes_old_files_only_when_training_begins(output_dir: Path, logged: list[str]) -> None:
    publish_files(output_dir, write)
    start = start_in(output_dir, overwrite_output_dir=True)
    assert start == Start(None, (output_dir / "checkpoint-1", output_dir / "checkpoint-2"), supersedes_model=True)
    assert (output_dir / "checkpoint-2" / MANIFEST).exists()
    logged.clear()
    remove_superseded(output_dir, start)
    assert [path.name for path in output_dir.iterdir()] == [".erniekit.lock"]
    assert len(logged) == 3


@pytest.mark.parametrize("inside", ["", "checkpoint-2"])
@pytest.mark.parametrize("role", ["model_folder", "weights_from"])
@pytest.mark.parametrize("resume", [None, True])
def test_overwriting_what_the_run_reads_is_refused_in_any_case(
    output_dir: Path, tmp_path: Path, inside: str, role: str, resume: bool | None
) -> None:
    (tmp_path / "link").symlink_to(output_dir)
    with pytest.raises(CheckpointError, match=r"would overwrite or remove\.\n  Choose another output_dir"):
        start_in(
            output_dir,
            overwrite_output_dir=True,
            resume_from_checkpoint=resume,
            **{role: tmp_path / "link" / inside},
        )


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "adapter.safetensors"])
def test_a_model_from_elsewhere_is_protected(tmp_path: Path, output_dir: Path, name: str) -> None:
    for folder in (tmp_path / "fresh", output_dir):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"contains a model that this run did not write .{name}"):
        start_in(tmp_path / "fresh")
    with pytest.raises(CheckpointError, match=r"does not belong to the run of .*\n.*overwrite_output_dir: true"):
        start_in(output_dir, resume_from_checkpoint=True)
    start = start_in(tmp_path / "fresh", overwrite_output_dir=True)
    assert start == Start(None, supersedes_model=True)
    remove_superseded(tmp_path / "fresh", start)
    assert (tmp_path / "fresh" / name).exists() == (name == "adapter.safetensors")  # what loading would not take


def test_a_resumed_run_replaces_only_its_own_model(output_dir: Path, tmp_path: Path) -> None:
    publish_files(output_dir, write)
    assert start_in(output_dir, resume_from_checkpoint=True) == Start(output_dir / "checkpoint-2")
    publish_files(tmp_path / "other", write)
    from_here = {"resume_from_checkpoint": str(output_dir / "checkpoint-2")}
    with pytest.raises(CheckpointError, match="contains a trained model, which does not belong to the run"):
        start_in(tmp_path / "other", **from_here)
    start = start_in(tmp_path / "other", overwrite_output_dir=True, **from_here)
    assert start == Start(output_dir / "checkpoint-2", supersedes_model=True)


def test_half_written_models_are_neither_read_nor_overwritten_unasked(output_dir: Path, tmp_path: Path) -> None:
    publish_files(output_dir, write)
    (output_dir / MANIFEST).rename(output_dir / PUBLISHING)
    for role in ("model_folder", "weights_from"):
        with pytest.raises(ModelFileError, match="half-written model"):
            start_in(tmp_path / "other", **{role: output_dir})
    assert start_in(output_dir, resume_from_checkpoint=True) == Start(output_dir / "checkpoint-2")
    for step in (1, 2):
        shutil.rmtree(output_dir / f"checkpoint-{step}")
    with pytest.raises(CheckpointError, match="already contains a half-written model"):
        start_in(output_dir)
    remove_superseded(output_dir, start_in(output_dir, overwrite_output_dir=True))
    assert [path.name for path in output_dir.iterdir()] == [".erniekit.lock"]


def test_weights_of_a_damaged_checkpoint_are_refused(output_dir: Path, tmp_path: Path) -> None:
    weights = {"weights_from": output_dir / "checkpoint-2"}
    assert start_in(tmp_path / "other", **weights) == Start(None)
    (output_dir / "checkpoint-2" / "model.safetensors").write_text("Weights")
    with pytest.raises(ModelFileError, match=r"(?s)checkpoint-2: the files are not those.*SHA-256 differs"):
        start_in(tmp_path / "other", **weights)
    (output_dir / "checkpoint-2" / MANIFEST).unlink()  # as a checkpoint of another program
    assert start_in(tmp_path / "other", **weights) == Start(None)


def test_resuming_from_a_path_under_the_home(output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(output_dir.parent))
    start = start_in(output_dir, resume_from_checkpoint=f"~/{output_dir.name}/checkpoint-2")
    assert start == Start(output_dir / "checkpoint-2")


def test_resume_true_takes_the_newest_complete_one_and_says_what_it_skips(output_dir: Path, logged: list[str]) -> None:
    assert start_in(output_dir, resume_from_checkpoint=True) == Start(output_dir / "checkpoint-2")
    (output_dir / "checkpoint-2" / "model.safetensors").write_text("damaged")
    logged.clear()
    assert start_in(output_dir, resume_from_checkpoint=True) == Start(output_dir / "checkpoint-1")
    assert "skipped" in logged[0]
    assert "checkpoint-2" in logged[0]
    assert "resuming from" in logged[1]


def test_resume_true_starts_afresh_where_there_is_nothing(tmp_path: Path, logged: list[str]) -> None:
    assert start_in(tmp_path, resume_from_checkpoint=True) == Start(None)
    assert "no complete checkpoint: starting afresh" in logged[0]


def test_resume_true_does_not_overwrite_a_finished_model(tmp_path: Path, logged: list[str]) -> None:
    publish_files(tmp_path, write)
    logged.clear()
    with pytest.raises(CheckpointError, match="already contains a trained model"):
        start_in(tmp_path, resume_from_checkpoint=True)
    assert not any("starting afresh" in line for line in logged)


def test_results_of_a_superseded_run_go_with_it(output_dir: Path) -> None:
    results = [output_dir / name for name in ("train_results.json", "eval_results.json", "loss.png")]
    for path in (*results, output_dir / "notes.txt"):
        path.write_text("old")
    resumed = start_in(output_dir, resume_from_checkpoint=str(output_dir / "checkpoint-1"), overwrite_output_dir=True)
    remove_superseded(output_dir, resumed)
    assert all(path.exists() for path in results)
    remove_superseded(output_dir, start_in(output_dir, overwrite_output_dir=True))
    assert sorted(path.name for path in output_dir.iterdir()) == [".erniekit.lock", "notes.txt"]


def test_resume_from_an_older_one_must_allow_the_newer_to_go(output_dir: Path) -> None:
    older = str(output_dir / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"do not lead to .*checkpoint-1: checkpoint-2\."):
        start_in(output_dir, resume_from_checkpoint=older)
    start = start_in(output_dir, resume_from_checkpoint=older, overwrite_output_dir=True)
    assert start == Start(output_dir / "checkpoint-1", (output_dir / "checkpoint-2",))


def test_resume_from_another_folder(output_dir: Path, tmp_path: Path) -> None:
    other = str(output_dir / "checkpoint-2")
    assert start_in(tmp_path / "other", resume_from_checkpoint=other) == Start(output_dir / "checkpoint-2")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("checkpoint-7", "there is no folder .*checkpoint-7"),
        ("", "is not a checkpoint-<step> folder. It contains checkpoint-1, checkpoint-2"),
        ("checkpoint-2", "is not complete: model.safetensors is missing"),
    ],
)
def test_resume_from_what_is_no_complete_checkpoint(output_dir: Path, path: str, message: str) -> None:
    (output_dir / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"resume_from_checkpoint: .*{message}"):
        start_in(output_dir, resume_from_checkpoint=str(output_dir / path))


def in_format(checkpoint: Path, number: int) -> None:
    path = checkpoint / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))


def test_checkpoints_of_a_later_version_are_passed_over_and_refused(output_dir: Path, logged: list[str]) -> None:
    in_format(output_dir / "checkpoint-2", 7)
    logged.clear()
    start = start_in(output_dir, resume_from_checkpoint=True, overwrite_output_dir=True)
    assert start.checkpoint == output_dir / "checkpoint-1"
    assert any("skipped" in line and "not for this version (it has format 7" in line for line in logged)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 cannot be resumed from: it has format 7 of another"):
        start_in(output_dir, resume_from_checkpoint=str(output_dir / "checkpoint-2"))


def test_checkpoints_of_the_first_format_are_resumed_from(output_dir: Path) -> None:
    in_format(output_dir / "checkpoint-2", 1)
    assert start_in(output_dir, resume_from_checkpoint=True).checkpoint == output_dir / "checkpoint-2"


def test_what_a_killed_run_left_is_removed_and_said(output_dir: Path, logged: list[str]) -> None:
    for name in (".writing-checkpoint-3", ".deleting-checkpoint-0"):
        (output_dir / name).mkdir()
        (output_dir / name / "part").write_text("x")
    logged.clear()
    start_in(output_dir, resume_from_checkpoint=True)
    assert sum("left half-written" in line for line in logged) == 2
    assert sorted(path.name for path in output_dir.iterdir()) == [".erniekit.lock", "checkpoint-1", "checkpoint-2"]
