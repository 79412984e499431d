"""Checkpoints completed by another process: complete or not there, whoever is killed, and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from erniekit.errors import CheckpointError
from erniekit.manifest import problems
from erniekit.training.checkpoint import async_save, lock, manifest
from erniekit.training.checkpoint.async_save import AsyncSaver, memory_shortage, new_staging, remove_abandoned_staging
from erniekit.training.checkpoint.atomic_folder import (
    checkpoint_folders,
    finalize_folder,
    newest_complete,
    step_of,
)
from erniekit.training.checkpoint.lock import locked, locked_by_writer
from erniekit.training.checkpoint.resume import open_output_folder
from tests.training.checkpoint.test_atomic_folder import content, folder_of


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of this test's own, on the same file system as shared memory where there is any."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(async_save, "SHARED_MEMORY", shm)
    return shm


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def saved() -> list[Path]:
    return []


@pytest.fixture
def saver(saved: list[Path]) -> Iterator[AsyncSaver]:
    with AsyncSaver(None, saved.append) as saver:
        yield saver


def save_with_stopped_writer(
    saver: AsyncSaver, target: Path, monkeypatch: pytest.MonkeyPatch, keep: Sequence[Path] = ()
) -> subprocess.Popen[str]:
    """Begin a save whose writer waits: it is stopped before it has its order."""
    give = saver._send_request

    def stop_then_send_request(keep: object) -> None:
        assert saver._process is not None
        os.kill(saver._process.pid, signal.SIGSTOP)
        give(keep)  # type: ignore[arg-type]

    monkeypatch.setattr(saver, "_send_request", stop_then_send_request)
    saver.save(target, content(step_of(target)), 1000, keep)
    assert saver._process is not None
    return saver._process


@pytest.mark.parametrize("room", [True, False], ids=["shared memory", "disk"])
def test_a_checkpoint_is_completed_beside(
    output_dir: Path,
    shared_memory: Path,
    saved: list[Path],
    room: bool,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[str],
) -> None:
    if not room:
        monkeypatch.setattr(async_save, "memory_shortage", lambda size: "/dev/shm is full")
    target = folder_of(output_dir, 3)
    with AsyncSaver(None, saved.append) as saver:
        process = save_with_stopped_writer(saver, target, monkeypatch)
        assert saver.writing == target and saved == [] and not target.exists()
        saver.check()  # does not wait
        assert saver.writing == target
        staged = [path.name for folder in shared_memory.iterdir() for path in folder.iterdir()]
        assert sorted(staged) == (["model.safetensors", "nested"] if room else [])
        assert (output_dir / ".writing-checkpoint-3" / "model.safetensors").exists() != room
        os.kill(process.pid, signal.SIGCONT)
        saver.wait()
        assert saved == [target] and saver.writing is None
    assert problems(target, hashes=True) == []
    assert (target / "nested" / "state.json").read_text() == '{"step": 3}'
    assert list(shared_memory.iterdir()) == []
    assert [path.name for path in checkpoint_folders(output_dir)] == ["checkpoint-3"]
    assert logged == ([] if room else [
        "async_save: /dev/shm is full: the checkpoint is written to the disk, and completed in the background"
    ])  # fmt: skip


def test_what_is_saved_is_a_snapshot(output_dir: Path, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    values = bytearray(b"1" * 100)
    give = saver._send_request
    monkeypatch.setattr(saver, "_send_request", lambda keep: (values.__setitem__(slice(None), b"2" * 100), give(keep)))
    saver.save(folder_of(output_dir, 1), lambda folder: (folder / "values").write_bytes(values), 100, ())  # type: ignore[arg-type,return-value]
    saver.wait()
    assert (folder_of(output_dir, 1) / "values").read_bytes() == b"1" * 100


def test_all_that_is_moved_is_on_the_disk_before_the_folder_has_its_name(
    output_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = manifest.sync, os.rename
    monkeypatch.setattr(manifest, "sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(
        os, "rename", lambda source, target: (events.append(f"rename {target.name}"), rename(source, target))
    )
    staged = tmp_path / "staged"
    staged.mkdir()
    content(1)(staged)
    finalize_folder(folder_of(output_dir, 1), staged)
    assert not staged.exists()
    assert set(events[: events.index("rename checkpoint-1")]) == {
        "sync model.safetensors",
        "sync state.json",
        "sync manifest.json",
        "sync nested",
        "sync .writing-checkpoint-1",
    }


def test_a_second_save_waits_for_the_first(
    output_dir: Path, saver: AsyncSaver, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save_with_stopped_writer(saver, folder_of(output_dir, 1), monkeypatch)
    monkeypatch.undo()
    complete: list[bool] = []

    def second(folder: Path) -> None:
        complete.append(folder_of(output_dir, 1).exists())
        content(2)(folder)

    wait = first.communicate

    def let_go() -> tuple[str, str]:
        os.kill(first.pid, signal.SIGCONT)
        return wait()

    monkeypatch.setattr(first, "communicate", let_go)
    saver.save(folder_of(output_dir, 2), second, 1000, ())
    saver.wait()
    assert complete == [True]
    assert saved == [folder_of(output_dir, 1), folder_of(output_dir, 2)]


def test_older_ones_go_when_the_new_one_is_complete_and_the_best_stays(
    output_dir: Path, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncSaver(2, saved.append) as saver:
        for step in (1, 2, 3):
            saver.save(folder_of(output_dir, step), content(step), 1000, {folder_of(output_dir, 1)})
            saver.wait()
        assert [step_of(folder) for folder in checkpoint_folders(output_dir)] == [1, 3]
        process = save_with_stopped_writer(saver, folder_of(output_dir, 4), monkeypatch, [folder_of(output_dir, 1)])
        assert [step_of(folder) for folder in checkpoint_folders(output_dir)] == [1, 3]
        os.kill(process.pid, signal.SIGCONT)
    assert [step_of(folder) for folder in checkpoint_folders(output_dir)] == [1, 4]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_killed_writer_is_an_error_and_keeps_the_earlier_one(
    output_dir: Path, shared_memory: Path, saved: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver(None, saved.append)
    saver.save(folder_of(output_dir, 1), content(1), 1000, ())
    saver.wait()
    save_with_stopped_writer(saver, folder_of(output_dir, 2), monkeypatch).kill()
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint-2: .* was ended by SIGKILL"):
        while True:  # as steps do
            saver.check()
    assert saved == [folder_of(output_dir, 1)]
    assert newest_complete(output_dir) == (folder_of(output_dir, 1), [])
    assert list(shared_memory.iterdir()) == [] and not list(output_dir.glob(".writing*"))
    saver.save(folder_of(output_dir, 2), content(2), 1000, ())  # what was wrong may be over
    monkeypatch.undo()
    saver.wait() if saver._process is None else os.kill(saver._process.pid, signal.SIGCONT)
    saver.wait()
    assert newest_complete(output_dir) == (folder_of(output_dir, 2), [])


def test_a_full_disk_is_told_by_the_writer(
    output_dir: Path, shared_memory: Path, saver: AsyncSaver, saved: list[Path]
) -> None:
    import resource

    saver.save(folder_of(output_dir, 1), content(1), 1000, ())
    saver.wait()

    def write(folder: Path) -> None:
        assert saver._process is not None  # it waits for its order, which comes after this
        resource.prlimit(saver._process.pid, resource.RLIMIT_FSIZE, (10**6, 10**6))
        (folder / "x").write_bytes(bytes(10**7))

    saver.save(folder_of(output_dir, 2), write, 1000, ())
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint-2: .*File too large[^\0]*Earlier"):
        saver.wait()
    assert newest_complete(output_dir) == (folder_of(output_dir, 1), [])
    assert sorted(path.name for path in output_dir.iterdir()) == [".erniekit.writer.lock", "checkpoint-1"]
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("room", [True, False], ids=["shared memory", "disk"])
def test_no_room_while_values_are_taken(
    output_dir: Path,
    shared_memory: Path,
    saver: AsyncSaver,
    saved: list[Path],
    room: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def overfull(folder: Path) -> None:
        content(2)(folder)
        raise OSError(28, "No space left on device")

    if not room:
        monkeypatch.setattr(async_save, "memory_shortage", lambda size: "no room")
    saver.save(folder_of(output_dir, 1), content(1), 1000, ())
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*: .*No space left on device[^\0]*Earlier checkpoints"):
        saver.save(folder_of(output_dir, 2), overfull, 1000, ())
    assert saver.writing is None
    assert newest_complete(output_dir) == (folder_of(output_dir, 1), [])
    assert list(shared_memory.iterdir()) == [] and not list(output_dir.glob(".writing*"))


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_writer(
    output_dir: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        AsyncSaver(None, lambda folder: None) as saver,
    ):
        save_with_stopped_writer(saver, folder_of(output_dir, 2), monkeypatch).kill()
        _ = 1 / 0
    assert "could not write" in logged[0] and "SIGKILL" in logged[0]


def is_locked(path: Path) -> bool:
    """Whether another process has the lock; asks without taking it."""
    if not path.exists():
        return False
    with path.open("a") as file:
        asked = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
    return bool(struct.unpack("hhqqi", asked)[0] != fcntl.F_UNLCK)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


TRAINER = """
import sys, os, signal, time
from pathlib import Path
from tests.training.checkpoint.test_async_save import is_locked, wait_until
from erniekit.training.checkpoint import async_save
from erniekit.training.checkpoint.lock import locked
async_save.SHARED_MEMORY = Path(sys.argv[2])
output_dir = Path(sys.argv[1])
def write(folder):
    for name in "abcd":
        (folder / name).write_bytes(bytes(1000))
        print("wrote", name, flush=True)
        if sys.argv[3] == f"wrote {name}":
            signal.pause()
class Saver(async_save.AsyncSaver):
    def _send_request(self, keep):
        if self.writing.name == "checkpoint-2":
            wait_until(lambda: is_locked(output_dir / ".erniekit.writer.lock"))
            os.kill(self._process.pid, signal.SIGSTOP)
        super()._send_request(keep)
        print("ordered", self.writing.name, self._process.pid, flush=True)
with locked(output_dir), Saver(None, lambda folder: print("saved", flush=True)) as saver:
    for step in (1, 2):
        saver.save(output_dir / f"checkpoint-{step}", write, 4000, ())
        saver.wait()
"""


def killed(output_dir: Path, shared_memory: Path, until: str) -> int:
    """Kill a process that saves once it has said `until`, the second checkpoint's writer being stopped by then.

    Returns:
        The number that ends its line: the writer's.
    """
    program = [sys.executable, "-c", TRAINER, str(output_dir), str(shared_memory), until]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(until))
        process.kill()
    return int(line.split()[-1]) if until.startswith("ordered") else 0


def test_a_trainer_killed_while_it_hands_over_leaves_nothing(output_dir: Path, shared_memory: Path) -> None:
    killed(output_dir, shared_memory, "wrote b")
    wait_until(lambda: not list(shared_memory.iterdir()))
    with locked(output_dir):
        assert not list(output_dir.glob("*checkpoint*"))


def test_the_writer_of_a_killed_trainer_completes_its_checkpoint(
    output_dir: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = killed(output_dir, shared_memory, "ordered checkpoint-2")
    said: list[str] = []

    def info(line: str) -> None:
        said.append(line)
        if line.startswith("waiting until the last checkpoint of the earlier run"):
            assert not folder_of(output_dir, 2).exists()
            os.kill(writer, signal.SIGCONT)

    monkeypatch.setattr(lock.logger, "info", info)
    with open_output_folder(output_dir, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        assert said[0].startswith("waiting")
        assert start.checkpoint == folder_of(output_dir, 2)
        assert list(shared_memory.iterdir()) == []
    assert problems(folder_of(output_dir, 2), hashes=True) == []


def test_both_killed_the_next_run_clears_up(output_dir: Path, shared_memory: Path, logged: list[str]) -> None:
    writer = killed(output_dir, shared_memory, "ordered checkpoint-2")
    os.kill(writer, signal.SIGKILL)
    wait_until(lambda: not is_alive(writer))
    assert len(list(shared_memory.iterdir())) == 1
    logged.clear()
    with open_output_folder(output_dir, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        assert start.checkpoint == folder_of(output_dir, 1)
    assert list(shared_memory.iterdir()) == [] and not list(output_dir.glob(".writing*"))
    assert any("a checkpoint that a killed run had not written" in line for line in logged)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_folders_in_shared_memory_that_are_held_are_left_alone(shared_memory: Path, logged: list[str]) -> None:
    held = new_staging()
    (held.folder / "values").write_bytes(b"x")
    remove_abandoned_staging()
    assert logged == []
    assert (held.folder / "values").exists()
    held.close()
    remove_abandoned_staging()
    assert not held.folder.exists()


def test_a_folder_in_shared_memory_that_goes_meanwhile_is_no_concern(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    """The writer of another run removes its own when it is done."""
    gone = shared_memory / "erniekit-checkpoint-gone"
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone]))
    remove_abandoned_staging()
    assert logged == []


def test_only_one_writer_in_a_folder(output_dir: Path, saver: AsyncSaver) -> None:
    def write(folder: Path) -> None:
        wait_until(lambda: is_locked(output_dir / ".erniekit.writer.lock"))
        with pytest.raises(CheckpointError, match="another process is completing"), locked_by_writer(output_dir):
            pass

    saver.save(folder_of(output_dir, 1), write, 1000, ())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda monkeypatch, shm: None, ""),
        (lambda monkeypatch, shm: shm.rmdir(), "there is no shared memory at"),
        (lambda monkeypatch, shm: monkeypatch.setattr(async_save, "available_memory", lambda: 10**6), "of memory are"),
    ],
)
def test_room(
    shared_memory: Path,
    change: Callable[[pytest.MonkeyPatch, Path], None],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(monkeypatch, shared_memory)
    assert (
        memory_shortage(1000).startswith(expected)
        if expected.startswith("there")
        else expected in memory_shortage(1000)
    )
    assert bool(memory_shortage(1000)) == bool(expected)
    assert "free of the" in memory_shortage(10**18) or expected.startswith("there")
