"""Processes that go on when the page and its server end: start them, recognise them later, ask one to end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from erniekit.errors import ConfigurationError
from erniekit.ui.workspace import STATE

# The shell outlives a signal to the group, so that it can still write down how the run has ended.
_SHELL = 'trap : INT TERM HUP; "$@"; code=$?; echo "$code" > "$0.new"; mv "$0.new" "$0"; exit "$code"'
_RECORD, _OUTPUT, _EXIT_CODE = "run.json", "output.log", "exit_code"
_MOST_RECORDS = 500  # of the latest runs that are looked at


@dataclass(frozen=True)
class Started:
    """A run that the page has started.

    Attributes:
        id: the name of its folder in `STATE`; later ones are greater.
        output: the output folder, relative to the working folder.
        file: the configuration, likewise.
        process: the id of its process, which leads a group of its own.
        born: when the process was started, as the system counts; it tells the process from a later one with its id.
        at: seconds since 1970.
    """

    id: str
    output: str
    file: str
    process: int
    born: str
    at: float


def start(command: Sequence[str], root: Path, *, output: str, file: str) -> Started:
    """Start `erniekit COMMAND` in the working folder, in a session of its own, and write down that it was started.

    Raises:
        ConfigurationError: it cannot be written down.
    """
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    folder = _state_folder(root) / identity
    folder.mkdir(mode=0o700)
    words = ["/bin/sh", "-c", _SHELL, str(folder / _EXIT_CODE), sys.executable, "-m", "erniekit", *command]
    with (folder / _OUTPUT).open("wb") as log:
        process = subprocess.Popen(
            words,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    threading.Thread(target=process.wait, daemon=True).start()  # no zombie stays while this server lives
    started = Started(identity, output, file, process.pid, _born(process.pid), time.time())
    (folder / _RECORD).write_text(json.dumps(asdict(started)), encoding="utf-8")
    return started


def started_runs(root: Path) -> list[Started]:
    """Return the runs that this page or an earlier one has started in the working folder, the latest first."""
    runs: list[Started] = []
    if not _is_own(root / STATE):
        return runs
    for path in sorted((root / STATE).glob(f"*/{_RECORD}"), reverse=True)[:_MOST_RECORDS]:
        with suppress(OSError, ValueError, TypeError):  # a record that nobody has finished, or somebody has changed
            runs.append(Started(**json.loads(path.read_text(encoding="utf-8"))))
    return runs


def _state_folder(root: Path) -> Path:
    """Return the page's own folder, made where it is missing, which git does not see.

    Raises:
        ConfigurationError: it belongs to somebody else, who could name any process as a run of ours.
    """
    folder = root / STATE
    try:
        folder.mkdir(mode=0o700)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigurationError(f"{folder}: cannot be written: {error.strerror}") from None
    if not _is_own(folder):
        raise ConfigurationError(f"{folder}: is not a folder of yours, so no run is started; remove it")
    return folder


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def is_alive(run: Started) -> bool:
    """Return whether the process of a run goes on."""
    return bool(run.born) and _born(run.process) == run.born


def exit_code(run: Started, root: Path) -> int | None:
    """Return how a run has ended; None: not yet, or nobody could write it down."""
    try:
        return int((root / STATE / run.id / _EXIT_CODE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def terminate(run: Started) -> None:
    """Ask all processes of a run to end, as Ctrl-C does."""
    if is_alive(run):
        with suppress(ProcessLookupError):
            os.killpg(run.process, signal.SIGTERM)


def output_tail(run: Started, root: Path, size: int = 20_000) -> str:
    """Return the last lines that a run has printed, of at most `size` bytes."""
    try:
        with (root / STATE / run.id / _OUTPUT).open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            data = file.read(size)
    except OSError:
        return ""
    if length > size:
        data = data[data.find(b"\n") + 1 :]
    return data.decode("utf-8", errors="replace")


def _born(process: int) -> str:
    """Return when a process was started, in ticks since the system was; "" if it has ended.

    Systems without /proc have only the process id, which another process may get later.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        if sys.platform == "linux":
            return ""
        try:
            os.kill(process, 0)
        except OSError:
            return ""
        return "unknown"
    return "" if fields[0] == "Z" else fields[19]
