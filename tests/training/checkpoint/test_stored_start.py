"""Where a run with an output folder in an object store starts, and what it does not touch until it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.errors import CheckpointError
from erniekit.hub.fetched import RUN_FILE
from erniekit.hub.object_store import ObjectFolder
from erniekit.manifest import problems
from erniekit.training.checkpoint.stored import upload_folder
from erniekit.training.checkpoint.stored_start import bring_checkpoint, open_stored_run, read_record, renewed
from tests.object_stores import sealed


def save(store: ObjectFolder, folder: Path, step: int, best: int | None = None) -> None:
    """Write a checkpoint on another machine, and upload it."""
    state = json.dumps({"best": {"step": best}})
    made = sealed(folder.parents[1] / f"elsewhere/checkpoint-{step}", {"trainer_state.json": state, "w": f"{step}"})
    upload_folder(store, made.name, made, store.list())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging" / "run"


def start(store: ObjectFolder, folder: Path, resume: str | bool = False, overwrite: bool = False, **options: bool):
    return open_stored_run(store, folder, resume=resume, overwrite=overwrite, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_first_run_names_itself_in_the_store(store: ObjectFolder, folder: Path) -> None:
    first = start(store, folder)
    assert (first.replaced, first.results) == ((), ()) and read_record(store) == first.record
    again = start(store, folder, resume=True)
    assert again.record.run == first.record.run and again.record.writer != first.record.writer
    assert read_record(store) == again.record, "the later process is the one that writes"


def test_another_machine_takes_the_newest_complete_checkpoint(
    store: ObjectFolder, folder: Path, logged: list[str]
) -> None:
    run = start(store, folder.with_name("first")).record.run
    for step in (2, 4, 6):
        save(store, folder, step)
    store.remove("checkpoint-6/w")
    store.write("training_log.jsonl", b"{}\n")
    resumed = start(store, folder, resume=True)
    assert resumed.record.run == run and resumed.replaced == ()
    assert names(folder) == ["checkpoint-4", "training_log.jsonl"]
    assert problems(folder / "checkpoint-4", hashes=True) == []
    assert f"downloading {store.url}/checkpoint-4" in logged


def test_a_damaged_checkpoint_is_skipped(store: ObjectFolder, folder: Path, logged: list[str]) -> None:
    save(store, folder, 2)
    save(store, folder, 4)
    store.write("checkpoint-4/w", b"9")
    start(store, folder, resume=True)
    assert names(folder) == ["checkpoint-2"]
    assert f"skipped {store.url}/checkpoint-4: w does not have the content that was written" in "\n".join(logged)


def test_what_is_here_is_not_downloaded_again(store: ObjectFolder, folder: Path, logged: list[str]) -> None:
    start(store, folder)
    save(store, folder, 2)
    sealed(folder / "checkpoint-8", {"w": "not uploaded yet"})
    (folder / "training_log.jsonl").write_text("of this machine")
    store.write("training_log.jsonl", b"older")
    start(store, folder, resume=True)
    assert names(folder) == ["checkpoint-8", "training_log.jsonl"] and logged == []
    assert (folder / "training_log.jsonl").read_text() == "of this machine"


def test_the_log_of_the_machine_that_came_further_is_taken(store: ObjectFolder, folder: Path) -> None:
    start(store, folder)
    sealed(folder / "checkpoint-2", {"w": "x"})
    (folder / "training_log.jsonl").write_text("old")
    save(store, folder, 4)
    store.write("training_log.jsonl", b"new")
    start(store, folder, resume=True)
    assert (folder / "training_log.jsonl").read_text() == "new"


def test_the_best_checkpoint_comes_with_the_newest(store: ObjectFolder, folder: Path) -> None:
    save(store, folder, 2)
    save(store, folder, 4)
    save(store, folder, 6, best=2)
    start(store, folder, resume=True, with_best=True)
    assert names(folder) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.parametrize("resume", [False, "/elsewhere/checkpoint-3"])
def test_a_run_that_is_there_is_protected(store: ObjectFolder, folder: Path, resume: str | bool) -> None:
    save(store, folder, 2)
    save(store, folder, 4)
    before = store.list()
    with pytest.raises(CheckpointError) as refused:
        start(store, folder, resume=resume)
    assert str(refused.value) == (
        f"{store.url} already contains checkpoints: checkpoint-2, checkpoint-4.\n"
        "  Set resume_from_checkpoint: true to continue that run, overwrite_output_dir: true to have it removed, or "
        "choose another output_dir."
    )
    assert store.list() == before


def test_a_model_that_is_there_is_protected(store: ObjectFolder, folder: Path, tmp_path: Path) -> None:
    upload_folder(store, "", sealed(tmp_path / "model", {"config.json": "{}"}), {})
    with pytest.raises(CheckpointError, match="already contains a trained model"):
        start(store, folder)


def test_what_is_replaced_stays_until_the_run_trains(store: ObjectFolder, folder: Path) -> None:
    run = start(store, folder.with_name("first")).record.run
    save(store, folder, 2)
    store.write("checkpoint-3/half", b"x")
    store.write("train_results.json", b"{}")
    fresh = start(store, folder, overwrite=True)
    assert fresh.replaced == ("", "checkpoint-2", "checkpoint-3") and fresh.results == ("train_results.json",)
    assert fresh.record.run == run and "checkpoint-2/w" in store.list()
    assert renewed(fresh, folder).record.run != run


def test_a_named_checkpoint_of_the_run(store: ObjectFolder, folder: Path) -> None:
    for step in (2, 4):
        save(store, folder, step)
    start(store, folder, resume=str(folder / "checkpoint-4"))
    assert names(folder) == ["checkpoint-4"]
    with pytest.raises(CheckpointError, match="contains checkpoints that do not lead to checkpoint-2: checkpoint-4"):
        start(store, folder, resume=str(folder / "checkpoint-2"))
    again = start(store, folder, resume=str(folder / "checkpoint-2"), overwrite=True)
    assert again.replaced == ("checkpoint-4",) and renewed(again, folder) is again
    with pytest.raises(CheckpointError, match=r"checkpoint-9 is not complete.*\n  Complete there: checkpoint-2, "):
        start(store, folder, resume=str(folder / "checkpoint-9"))


def test_a_folder_of_another_run_is_set_aside(store: ObjectFolder, folder: Path, logged: list[str]) -> None:
    start(store, folder)
    sealed(folder / "checkpoint-500", {"w": "of a run that another machine has replaced"})
    store.write(RUN_FILE, json.dumps({"run": "theirs", "writer": "they"}).encode())
    save(store, folder, 2)
    resumed = start(store, folder, resume=True)
    assert resumed.record.run == "theirs" and names(folder) == ["checkpoint-2"]
    (aside,) = [path for path in folder.parent.glob("run.*") if path.is_dir()]
    assert names(aside) == ["checkpoint-500"]
    assert any(line.startswith(f"{aside}: set aside, because the store has a run") for line in logged)


def test_other_machines_find_the_checkpoint_in_the_store(store: ObjectFolder, folder: Path, tmp_path: Path) -> None:
    start(store, folder)
    sealed(folder / "checkpoint-8", {"w": "not uploaded yet"})
    start(store, folder, resume=True, several_machines=True)
    there = tmp_path / "second machine" / "run"
    bring_checkpoint(store, there, "checkpoint-8")
    bring_checkpoint(store, there, "checkpoint-8")
    assert problems(there / "checkpoint-8", hashes=True) == []


def test_a_record_that_cannot_be_read_is_none(store: ObjectFolder) -> None:
    assert read_record(store) is None
    for text in (b"", b"{", b"[]", b'{"run": 1}'):
        store.write(RUN_FILE, text)
        assert read_record(store) is None
