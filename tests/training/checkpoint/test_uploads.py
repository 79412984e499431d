"""Uploads of a run: what goes up and when, what a kill or a failing store leaves, and what the end of a run says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.hub.object_store import ObjectFolder, StoreError
from erniekit.manifest import problems
from erniekit.training.checkpoint import uploads as module
from erniekit.training.checkpoint.atomic_folder import prune, publish_files
from erniekit.training.checkpoint.manifest import atomic_write_text
from erniekit.training.checkpoint.resume import CONFIG_FILE
from erniekit.training.checkpoint.stored import stored_checkpoints, upload_folder
from erniekit.training.checkpoint.stored_start import RunRecord, open_stored_run, read_record, write_record
from erniekit.training.checkpoint.uploads import AnotherWriterError, Uploads
from tests.object_stores import KilledError, killed_before, sealed, with_faults

FILES = {"config.json": "{}", "w": "weights", "optimizer": "state"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging" / "run"


def begun(store: ObjectFolder, folder: Path, limit: int | None = None, **options: Any) -> Uploads:
    """The uploads of a run that has just begun to train."""
    options = {"resume": False, "overwrite": False, **options}
    uploads = Uploads(store, folder, open_stored_run(store, folder, **options), limit)
    atomic_write_text(folder / CONFIG_FILE, "stage: SFT")
    return uploads


def save(folder: Path, step: int) -> Path:
    return sealed(folder / f"checkpoint-{step}", {**FILES, "w": f"weights {step}"})


def stored(store: ObjectFolder) -> list[str]:
    return stored_checkpoints(store, store.list())


def test_checkpoints_the_model_and_logs_go_up(store: ObjectFolder, folder: Path, logged: list[str]) -> None:
    uploads = begun(store, folder)
    save(folder, 2)
    written = ("training_log.jsonl", "logs/events", "rank_logs/rank-0.log")
    for name in (*written, "control", ".erniekit.lock", ".writing-x/a"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    uploads.upload()
    assert stored(store) == ["checkpoint-2"]
    assert uploads.missing() == []
    publish_files(folder, lambda target: [(target / name).write_text(text) for name, text in FILES.items()] and None)
    sealed(folder / "export-2", {"a": "x"})
    assert uploads.missing() == ["export-2", "the model"]
    uploads.finish()
    loose = {name for name in store.list() if not name.startswith(("checkpoint-2/", "export-2/"))}
    assert loose == {*written, CONFIG_FILE, "erniekit-run.json", *FILES, "manifest.json"}
    uploaded = [f"uploaded {what} to {store.url}" for what in ("checkpoint-2", "export-2", "the model")]
    assert [line.partition(" (")[0] for line in logged] == [*uploaded, f"everything is in {store.url}"]
    assert not list(folder.parent.glob(".uploading*"))


def test_the_log_goes_up_before_the_checkpoint_that_it_leads_to(
    store: ObjectFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = begun(store, folder)
    uploads.upload()
    save(folder, 2)
    (folder / "training_log.jsonl").write_text("until step 2")
    seen: list[bytes | None] = []
    monkeypatch.setattr(module, "upload_folder", lambda *rest: seen.append(store.read("training_log.jsonl")))
    uploads.upload()
    assert seen == [b"until step 2"]


def test_nothing_goes_up_before_the_run_trains(store: ObjectFolder, folder: Path) -> None:
    upload_folder(store, "checkpoint-9", save(folder.parent / "old", 9), {})
    store.write("train_results.json", b"old")
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text("of an earlier run")
    uploads = Uploads(store, folder, open_stored_run(store, folder, resume=False, overwrite=True))
    (folder / "rank_logs").mkdir()
    (folder / "rank_logs/rank-0.log").write_text("refused")
    before = store.list()
    uploads.finish()
    assert store.list() == before and uploads.missing() == []
    atomic_write_text(folder / CONFIG_FILE, "of this run")
    uploads.upload()
    assert sorted(store.list()) == ["erniekit-run.json", "rank_logs/rank-0.log", CONFIG_FILE]


def test_the_newest_checkpoint_goes_first_and_limits_hold_there_too(
    store: ObjectFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 3):  # of another machine
        upload_folder(store, f"checkpoint-{step}", save(folder.parent / "other", step), {})
    uploads = begun(store, folder, limit=2, resume=True)
    order: list[str] = []
    upload = module.upload_folder
    monkeypatch.setattr(module, "upload_folder", lambda s, name, *rest: order.append(name) or upload(s, name, *rest))
    for step in (5, 7):
        save(folder, step)
    prune(folder, 2, {folder / "checkpoint-7"})
    uploads.finish()
    assert order == ["checkpoint-7", "checkpoint-5"] and stored(store) == ["checkpoint-5", "checkpoint-7"]
    assert not any(name.startswith(("checkpoint-1/", "checkpoint-3/")) for name in store.list())


def test_a_checkpoint_that_is_removed_here_meanwhile_arrives_whole(store: ObjectFolder, folder: Path) -> None:
    def remove_here(call: Callable[[], Any]) -> Any:
        shutil.rmtree(folder / "checkpoint-2")
        return call()

    open_stored_run(store, folder, resume=False, overwrite=False)
    faulty = with_faults(store, 2, remove_here)  # after the name of the run and its configuration
    uploads = begun(faulty, folder)
    save(folder, 2)
    uploads.upload()
    assert not (folder / "checkpoint-2").exists() and stored(store) == ["checkpoint-2"]


def test_folders_without_links_are_uploaded_as_they_are(
    store: ObjectFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: Any) -> None:
        raise PermissionError("links are refused")

    monkeypatch.setattr(module.os, "link", refuse)
    uploads = begun(store, folder)
    save(folder, 2)
    uploads.finish()
    assert stored(store) == ["checkpoint-2"]


def run_once(store: ObjectFolder, folder: Path) -> None:
    """Two checkpoints, of which one is kept, and the model, with the uploads of each; resumes what is there."""
    uploads = begun(store, folder, limit=1, resume=True)
    for step in (2, 4):
        if not (folder / f"checkpoint-{step}").exists() and "checkpoint-4" not in stored(store):
            save(folder, step)
        prune(folder, 1, set())
        uploads.upload()
    publish_files(folder, lambda target: [(target / name).write_text(text) for name, text in FILES.items()] and None)
    uploads.finish()


@pytest.mark.parametrize("at", range(26))
def test_a_run_killed_between_any_two_changes_goes_on_to_the_same_end(
    store: ObjectFolder, folder: Path, tmp_path: Path, at: int
) -> None:
    """Each checkpoint in the store is complete or none, and another machine goes on from the newest."""
    killed = with_faults(store, at, killed_before)
    try:
        run_once(killed, folder)
        finished = True
    except KilledError:
        finished = False
    newest = stored(store)
    there = tmp_path / "machine 2" / "run"
    if newest:
        open_stored_run(store, there, resume=True, overwrite=False)
        assert problems(there / newest[-1], hashes=True) == []
        assert (there / newest[-1] / "w").read_text() == f"weights {newest[-1].rpartition('-')[2]}"
    assert finished == (at >= killed.files.changes)
    run_once(store, there)
    assert stored(store) == ["checkpoint-4"]
    assert store.read("w") == b"weights" and "manifest.json" in store.list()


def test_the_kills_cover_a_whole_run(store: ObjectFolder, folder: Path) -> None:
    counted = with_faults(store)
    run_once(counted, folder)
    assert 15 <= counted.files.changes <= 26


def failing_from(store: ObjectFolder, at: int) -> ObjectFolder:
    """A store that takes no more changes from some moment on."""
    faulty = with_faults(store)
    change = type(faulty.files).__getattr__

    class Failing(type(faulty.files)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            operation = change(self, name)
            if name not in ("put_file", "pipe_file", "rm_file"):
                return operation

            def act(*arguments: Any, **options: Any) -> Any:
                if self.changes >= at:
                    raise ConnectionError("no route")
                return operation(*arguments, **options)

            return act

    faulty.files.__class__ = Failing
    return faulty


def test_a_store_that_fails_to_the_end_is_told_and_nothing_is_lost(store: ObjectFolder, folder: Path) -> None:
    uploads = begun(failing_from(store, 3), folder)
    save(folder, 2)
    with pytest.raises(StoreError) as failed:
        uploads.finish()
    assert str(failed.value).splitlines()[0].startswith(f"could not upload {store.url}/checkpoint-2/")
    assert str(failed.value).endswith(
        f"{store.url}: not uploaded: checkpoint-2. All of it is complete in {folder}.\n"
        "  The same command with resume_from_checkpoint=true uploads it first, on this machine."
    )
    assert stored(store) == [] and problems(folder / "checkpoint-2", hashes=True) == []
    begun(store, folder, resume=True).finish()
    assert stored(store) == ["checkpoint-2"]


def test_another_process_that_begins_to_write_stops_the_uploads(store: ObjectFolder, folder: Path) -> None:
    uploads = begun(store, folder)
    save(folder, 2)
    uploads.upload()
    write_record(store, RunRecord("x", "another"))
    save(folder, 4)
    with pytest.raises(AnotherWriterError, match="another run has begun to write there since this one began"):
        uploads.upload()
    with pytest.raises(StoreError, match="not uploaded: checkpoint-4"):
        uploads.finish()
    assert stored(store) == ["checkpoint-2"] and read_record(store) == RunRecord("x", "another")


def test_the_thread_uploads_while_the_run_goes_on(
    store: ObjectFolder, folder: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    failed = failing_from(store, 3)
    uploads = begun(failed, folder)
    uploads.begin()
    save(folder, 2)
    while not any("It is tried again" in line for line in logged):
        uploads._thread.join(0.01)
    type(failed.files).__getattr__ = lambda self, name: getattr(self._files, name)
    while uploads.missing():
        uploads._thread.join(0.01)
    uploads.finish()
    assert stored(store) == ["checkpoint-2"]
    assert len([line for line in logged if "It is tried again" in line]) <= 2, "a failure is told once"
    assert not uploads._thread.is_alive()


def test_a_process_that_has_to_end_says_what_is_missing(store: ObjectFolder, folder: Path, logged: list[str]) -> None:
    uploads = begun(store, folder)
    uploads.abandon()
    assert logged == []
    save(folder, 2)
    uploads.abandon()
    assert logged[0].startswith(f"warning: {store.url}: not uploaded: checkpoint-2. All of it is complete in {folder}.")


def test_an_evaluation_uploads_what_it_changes(store: ObjectFolder, folder: Path) -> None:
    save(folder, 2)
    (folder / "training_log.jsonl").write_text("old")
    uploads = Uploads(store, folder, None)
    (folder / "eval_results.json").write_text("{}")
    uploads.begin()
    uploads.finish()
    assert list(store.list()) == ["eval_results.json"]
