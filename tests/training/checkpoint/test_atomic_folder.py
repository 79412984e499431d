"""Folders on disk are complete or not there, wherever the process or the disk fails."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from erniekit.errors import CheckpointError
from erniekit.manifest import problems
from erniekit.model.storage.model_folder import PUBLISHING, is_half_written
from erniekit.training.checkpoint import atomic_folder, manifest
from erniekit.training.checkpoint.atomic_folder import (
    MANIFEST,
    checkpoint_folders,
    holds_foreign_model,
    holds_model,
    newest_complete,
    prune,
    publish_files,
    remove_leftovers,
    remove_model,
    step_of,
    write_folder,
)
from erniekit.training.checkpoint.lock import locked


def content(step: int) -> Callable[[Path], None]:
    """A writer of a small checkpoint whose every byte depends on the step."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(bytes([step]) * 100)
        (folder / "nested").mkdir()
        (folder / "nested" / "state.json").write_text(json.dumps({"step": step}))

    return write


def folder_of(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def test_what_is_written_is_complete(tmp_path: Path) -> None:
    write_folder(folder_of(tmp_path, 3), content(3))
    assert problems(folder_of(tmp_path, 3), hashes=True) == []
    assert json.loads((folder_of(tmp_path, 3) / MANIFEST).read_text())["files"].keys() == {
        "model.safetensors",
        "nested/state.json",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "has 1 bytes instead of 100"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "SHA-256 differs"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"mod'), "unreadable"),
        (lambda folder: (folder / MANIFEST).write_text("[1]"), "unreadable"),
    ],
)
def test_damage_is_seen_and_the_older_checkpoint_taken(
    tmp_path: Path, damage: Callable[[Path], None], expected: str
) -> None:
    for step in (1, 2):
        write_folder(folder_of(tmp_path, step), content(step))
    damage(folder_of(tmp_path, 2))
    assert expected in "; ".join(problems(folder_of(tmp_path, 2), hashes=True))
    newest, skipped = newest_complete(tmp_path)
    assert newest == folder_of(tmp_path, 1)
    assert len(skipped) == 1
    assert "checkpoint-2" in skipped[0]
    assert expected in skipped[0]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (1000, 9, 20):
        write_folder(folder_of(tmp_path, step), content(step % 256))
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-12").write_text("a file, not a folder")
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path)] == [9, 20, 1000]
    assert newest_complete(tmp_path) == (folder_of(tmp_path, 1000), [])
    assert newest_complete(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, (), [1, 2, 3, 4]),
        (2, (), [3, 4]),
        (1, (), [4]),
        (2, (1,), [1, 4]),
        (1, (1, 4), [1, 4]),
        (9, (), [1, 2, 3, 4]),
    ],
)
def test_pruning(tmp_path: Path, limit: int | None, keep: tuple[int, ...], left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        write_folder(folder_of(tmp_path, step), content(step))
    (tmp_path / "checkpoint-5").mkdir()  # incomplete: neither counts nor goes
    prune(tmp_path, limit, {folder_of(tmp_path, step) for step in keep})
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path)] == [*left, 5]


def test_a_folder_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_folder(folder_of(tmp_path, step), content(step))

    def refuse(*_arguments: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"could not remove .*checkpoint-1: .*busy[^\0]*checkpoint is complete"):
        prune(tmp_path, 1, {folder_of(tmp_path, 2)})
    assert newest_complete(tmp_path) == (folder_of(tmp_path, 2), [])


def test_an_incomplete_folder_is_replaced(tmp_path: Path) -> None:
    folder_of(tmp_path, 2).mkdir()
    (folder_of(tmp_path, 2) / "old").write_text("old")
    write_folder(folder_of(tmp_path, 2), content(2))
    assert problems(folder_of(tmp_path, 2), hashes=True) == []
    assert not (folder_of(tmp_path, 2) / "old").exists()


def test_files_into_a_folder_replace_the_earlier_set_and_nothing_else(tmp_path: Path) -> None:
    def first(folder: Path) -> None:
        for name in ("model-00001-of-00002", "model-00002-of-00002"):
            (folder / name).write_text(name)

    publish_files(tmp_path, first)
    (tmp_path / "training_log.jsonl").write_text("{}")
    write_folder(folder_of(tmp_path, 1), content(1))
    publish_files(tmp_path, content(7))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1",
        MANIFEST,
        "model.safetensors",
        "nested",
        "training_log.jsonl",
    ]
    assert problems(tmp_path, hashes=True) == []
    assert holds_model(tmp_path) == "a trained model"
    remove_model(tmp_path)
    assert holds_model(tmp_path) == ""
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "training_log.jsonl").exists()


# --------------------------------------------------------------------------------------------- a process that is killed


class CrashError(BaseException):
    """The process is gone: nothing after this point runs, not even the clean-up of ordinary errors."""


class CrashingDisk:
    """Counts the operations that change the disk, and ends the process before the one numbered `crash_at`."""

    OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self.crash_at = -1
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10's pathlib keeps its own references
        for name in self.OPERATIONS:
            counted = self._counted(getattr(os, name))
            monkeypatch.setattr(os, name, counted)
            if hasattr(accessor, name):
                monkeypatch.setattr(accessor, name, staticmethod(counted))
        opened = io.open

        def counted_open(file: object, mode: str = "r", *arguments: object, **options: object) -> object:
            if set(mode) & set("wax+"):
                self._tick()
            return opened(file, mode, *arguments, **options)

        monkeypatch.setattr(io, "open", counted_open)
        if accessor is not None:
            monkeypatch.setattr(accessor, "open", staticmethod(counted_open))

    def _counted(self, operation: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            self._tick()
            return operation(*arguments, **options)

        return counted

    def _tick(self) -> None:
        self.done += 1
        if self.done == self.crash_at:
            raise CrashError

    def run(self, action: Callable[[], None], crash_at: int = -1) -> bool:
        """Whether `action` came to its end."""
        self.done, self.crash_at = 0, crash_at
        try:
            action()
        except CrashError:
            return False
        finally:
            self.crash_at = -1
        return True


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> CrashingDisk:
    return CrashingDisk(monkeypatch)


def crash_points(disk: CrashingDisk, prepare: Callable[[], Callable[[], None]]) -> Iterator[int]:
    """Run what `prepare` returns with a crash before its first operation, then its second, until it gets through."""
    point = 0
    while True:
        point += 1
        action = prepare()
        if disk.run(action, crash_at=point):
            assert point > 10, "the operations are not being counted"
            return
        yield point


def test_a_crash_at_any_point_of_saving_leaves_a_complete_checkpoint(tmp_path: Path, disk: CrashingDisk) -> None:
    runs = iter(range(1000))
    output_dir = tmp_path

    def save(step: int) -> None:
        write_folder(folder_of(output_dir, step), content(step))
        prune(output_dir, 2, {folder_of(output_dir, step)})

    def prepare() -> Callable[[], None]:
        nonlocal output_dir
        output_dir = tmp_path / str(next(runs))
        output_dir.mkdir()
        for step in (1, 2):
            save(step)
        return lambda: save(3)

    for point in crash_points(disk, prepare):
        remove_leftovers(output_dir)
        newest, skipped = newest_complete(output_dir)
        assert newest in (folder_of(output_dir, 2), folder_of(output_dir, 3)), f"crash before operation {point}"
        assert skipped == []
        assert all(problems(folder, hashes=True) == [] for folder in checkpoint_folders(output_dir))
        assert not any(path.name.startswith(".") for path in output_dir.iterdir())
        if newest == folder_of(output_dir, 2):  # the resumed run gets to step 3 again
            save(3)
        assert newest_complete(output_dir) == (folder_of(output_dir, 3), [])


def test_a_crash_while_publishing_leaves_no_mixed_complete_set(tmp_path: Path, disk: CrashingDisk) -> None:
    runs = iter(range(1000))
    output_dir = tmp_path

    def prepare() -> Callable[[], None]:
        nonlocal output_dir
        output_dir = tmp_path / str(next(runs))
        publish_files(output_dir, content(1))
        return lambda: publish_files(output_dir, content(2))

    for _point in crash_points(disk, prepare):
        remove_leftovers(output_dir)
        if not is_half_written(output_dir):
            assert problems(output_dir, hashes=True) == []
            step = json.loads((output_dir / "nested" / "state.json").read_text())["step"]
            assert (output_dir / "model.safetensors").read_bytes() == bytes([step]) * 100
        publish_files(output_dir, content(3))
        assert problems(output_dir, hashes=True) == []


def test_the_next_attempt_repairs_a_crash_while_publishing(tmp_path: Path, disk: CrashingDisk) -> None:
    """First one file, then (interrupted) two shards: none of either set may stay beside the last set."""
    runs = iter(range(1000))
    output_dir = tmp_path

    def shards(folder: Path) -> None:
        for number in (1, 2):
            (folder / f"model-{number:05}-of-00002.safetensors").write_text("shard")

    def prepare() -> Callable[[], None]:
        nonlocal output_dir
        output_dir = tmp_path / str(next(runs))
        publish_files(output_dir, content(1))
        return lambda: publish_files(output_dir, shards)

    for _point in crash_points(disk, prepare):
        remove_leftovers(output_dir)
        assert not holds_foreign_model(output_dir)
        publish_files(output_dir, content(3))
        assert sorted(path.name for path in output_dir.iterdir()) == [MANIFEST, "model.safetensors", "nested"]


def test_a_crash_while_removing_a_model_leaves_it_full_or_marked(tmp_path: Path, disk: CrashingDisk) -> None:
    runs = iter(range(1000))
    output_dir = tmp_path

    def prepare() -> Callable[[], None]:
        nonlocal output_dir
        output_dir = tmp_path / str(next(runs))
        publish_files(output_dir, content(1))
        return lambda: remove_model(output_dir)

    for _point in crash_points(disk, prepare):
        assert is_half_written(output_dir) or problems(output_dir, hashes=True) == []
        remove_leftovers(output_dir)
        remove_model(output_dir)
        assert [path.name for path in output_dir.iterdir()] == ["nested"]


@pytest.mark.parametrize("name", ["../victim", "nested/../../victim", "/victim", ""])
def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path, name: str) -> None:
    name = str(tmp_path / "victim") if name == "/victim" else name
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    entry = {"size": 8, "sha256": hashlib.sha256(b"precious").hexdigest()}
    for listing in (MANIFEST, PUBLISHING):
        (folder / listing).write_text(json.dumps({"format": 1, "files": {name: entry}}))
    assert problems(folder, hashes=True) == [f"{MANIFEST} is missing or unreadable"]
    publish_files(folder, content(1))
    remove_model(folder)
    assert (tmp_path / "victim").read_text() == "precious"


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power only what was synced is sure to be there."""
    events: list[str] = []
    sync, rename = manifest.sync, os.rename
    for module in (atomic_folder, manifest):
        monkeypatch.setattr(module, "sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(
        os, "rename", lambda source, target: (events.append(f"rename {target.name}"), rename(source, target))
    )
    write_folder(folder_of(tmp_path, 1), content(1))
    renamed = events.index("rename checkpoint-1")
    before = events[:renamed]
    assert set(before) == {
        "sync model.safetensors",
        "sync state.json",
        "sync manifest.json",
        "sync nested",
        "sync .writing-checkpoint-1",
    }
    assert before.index("sync manifest.json") > before.index("sync state.json")
    assert events[renamed + 1 :] == [f"sync {tmp_path.name}"]


# ---------------------------------------------------------------------------------------------------- a disk that fails


def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    write_folder(folder_of(tmp_path, 1), content(1))

    def overfull(folder: Path) -> None:
        content(2)(folder)
        (folder / "optimizer.safetensors").symlink_to("/dev/full")
        save_file({"moment": np.zeros(100_000)}, folder / "optimizer.safetensors")

    with pytest.raises(
        CheckpointError, match=r"could not write .*checkpoint-2: .*No space left[^\0]*Earlier checkpoints"
    ):
        write_folder(folder_of(tmp_path, 2), overfull)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert newest_complete(tmp_path) == (folder_of(tmp_path, 1), [])


@pytest.mark.parametrize("operation", ["fsync", "rename"])
def test_a_disk_that_refuses_any_operation_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    write_folder(folder_of(tmp_path, 1), content(1))

    def refuse(*_arguments: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, operation, refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_folder(folder_of(tmp_path, 2), content(2))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


# ----------------------------------------------------------------------------------------------------------- two runs


def _hold(output_dir: Path, ready: object, release: object) -> None:
    with locked(output_dir):
        ready.set()
        release.wait(60)


def test_a_second_run_in_a_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(CheckpointError, match="another run is writing to"), locked(tmp_path):
            pass
    finally:
        holder.kill()  # as a run that is killed: the kernel lets go of its lock
        holder.join()
    with locked(tmp_path):
        pass


def test_an_output_dir_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with (
        pytest.raises(CheckpointError, match=r"output_dir .*file/run cannot be written"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
