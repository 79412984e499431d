"""Report a run to a tracker whose client runs in a process of its own.

The client may take seconds to import, wait for a network, hang or crash: the run gives it what is to be told and never
waits, except a while at its end. It inherits the environment, where trackers find their keys; what this module writes
into logs holds none. `tracker_clients` is the other side.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import erniekit
from erniekit.redaction import redacted
from erniekit.terminal import escape_control_characters
from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.reported import (
    card_of,
    evaluation_figures,
    facts_of,
    picture_of,
    samples_of,
    training_figures,
)

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

logger = logging.getLogger(__name__)

CLIENTS = "erniekit.training.callbacks.tracker_clients"
END_SECONDS = 60.0  # for which the end of a run waits for a client to send what is left
STOP_SECONDS = 10.0  # where the run was stopped before its end
MOST_WAITING = 1 << 24  # bytes that a client may be behind; what comes then is lost
_POLL_SECONDS = 0.1


class TrackerProcess(Callback):
    """Give what is reported of a run to the client of a tracker.

    Args:
        name: of the tracker, and of its folder in `logging_dir`.
        python: the interpreter that has the client's library; None: this one.
        end_seconds: after which a client that does not end is ended.
    """

    def __init__(
        self, name: str, logging_dir: Path, *, python: str | None = None, end_seconds: float | None = None
    ) -> None:
        self._name, self._folder = name, logging_dir / name
        self._python, self._end_seconds = python or sys.executable, END_SECONDS if end_seconds is None else end_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._run: TrainingRun | None = None
        self._waiting, self._answers = bytearray(), bytearray()
        self._finished = self._warned = False

    def on_train_begin(self, run: TrainingRun) -> None:
        self._run = run
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._process = _start(self._python, self._name, self._folder)
        except OSError as error:
            self._warn(f"cannot be started: {error.strerror}")
            return
        self._send("start", name=run.name, resumed=run.first_step > 0, **facts_of(run))

    def on_log(self, record: Record) -> None:
        self._send("figures", step=record["step"], values=training_figures(record))

    def on_evaluate(self, record: Record) -> None:
        self._send("figures", step=record["step"], values=evaluation_figures(record))
        if self._run and (samples := samples_of(self._run.output_dir, record)):
            self._send("samples", step=record["step"], samples=samples)

    def on_train_end(self, result: TrainResult) -> None:
        self._finished = True
        if self._run is None:
            return
        if picture := picture_of(self._run.output_dir):
            self._send("picture", name="loss", path=str(Path(picture).resolve()))
        self._send("card", values=card_of(self._run, result))

    def close(self) -> None:
        """Let the client end; end it if it takes too long."""
        if self._process is None:
            return
        self._send("finish", finished=self._finished)
        process, seconds = self._process, self._end_seconds if self._finished else min(STOP_SECONDS, self._end_seconds)
        until = time.monotonic() + seconds
        try:
            while process.poll() is None and time.monotonic() < until:
                if not self._waiting and process.stdin is not None:
                    process.stdin.close()
                    process.stdin = None
                self._exchange(_POLL_SECONDS)
            self._exchange(0.0)
            if process.poll() is None:
                self._warn(f"has not ended after {seconds:g} s, so it is ended; what it wrote is in {self._folder}")
        finally:
            self._process = None
            _end(process)

    def _send(self, call: str, **values: Any) -> None:
        """Give a call to the client; drop it if the client has ended or is far behind."""
        if self._process is None or self._process.stdin is None:
            return
        line = json.dumps({"call": call, **values}, default=str).encode() + b"\n"
        if len(self._waiting) + len(line) > MOST_WAITING:
            self._warn("does not read what it is told; what comes now is lost for it")
        else:
            self._waiting += line
        self._exchange(0.0)

    def _exchange(self, seconds: float) -> None:
        """Write what the client takes, read what it answers, and wait at most so long for either."""
        process = self._process
        if process is None or process.stdout is None:
            return
        code, poller = process.poll(), select.poll()
        poller.register(process.stdout, select.POLLIN)
        if self._waiting and process.stdin is not None:
            poller.register(process.stdin, select.POLLOUT)
        poller.poll(1000 * seconds)
        try:
            while self._waiting and process.stdin is not None:
                del self._waiting[: os.write(process.stdin.fileno(), self._waiting[:65536])]
        except BlockingIOError:
            pass
        except OSError:  # the client has ended, and its answers say why
            self._waiting.clear()
            if process.stdin is not None:
                process.stdin.close()
            process.stdin = None
        with suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), 65536):
                self._answers += data
        *lines, rest = bytes(self._answers).split(b"\n")
        self._answers[:] = rest
        for line in lines:
            self._tell(json.loads(line))
        if code:
            self._warn(f"its process has ended with exit code {code}")

    def _tell(self, answer: dict[str, str]) -> None:
        if "error" in answer:
            self._warn(answer["error"])
        else:
            logger.info(escape_control_characters(redacted(f"{self._name}: {answer['told']}")))

    def _warn(self, what: str) -> None:
        """Say what is wrong with the tracker, once in a run."""
        if not self._warned:
            text = escape_control_characters(redacted(f"report_to: {self._name}: {what}"))
            logger.warning(f"{text}; the run goes on")
        self._warned = True


def _start(python: str, name: str, folder: Path) -> subprocess.Popen[bytes]:
    source = str(Path(erniekit.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = ["-P"] if sys.version_info >= (3, 11) else []  # do not import from the current folder
    process = subprocess.Popen(
        [python, *flags, "-m", CLIENTS, name, str(folder.resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # libraries print what they like, keys too
        # addresses of repositories may hold passwords, so no library finds one
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GIT_DIR": os.devnull},
        start_new_session=True,  # the terminal's signals are for the run
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a client and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
