"""Ranks that begin with Paddle imported: a start takes some 30 ms in place of 1.5 s of processor time.

`warm_starts` has `erniekit.launch.local` start its ranks as forks of a server that has imported what training needs,
one server for each test process. A forked rank has its own session, environment, output and exit code, as a rank that
was started anew; only the seed of Python's hashes is that of the server. `ERNIEKIT_COLD_RANKS=1` (`make test-all`) has
every rank start anew.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

from erniekit.distributed.rank import LAUNCHER
from erniekit.launch import local

ROOT = Path(__file__).parents[2]
# Read when Paddle is imported: a rank that has another value of one of these, or a FLAGS_ variable, starts anew.
SERVER_VARIABLES = {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "1"}
QUIET = {"GLOG_minloglevel": "1"}  # also read then, but it only decides what is logged


class ForkedProcess:
    """As much of `subprocess.Popen` as the launcher uses, for `python -m MODULE ...` in a fork of the server."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path | None, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any,
        start_new_session: bool,
    ) -> None:  # fmt: skip
        assert start_new_session and stdin == subprocess.DEVNULL
        context = _server()
        self.stdout, standard_output = _output(stdout)
        self.stderr, standard_error = (None, standard_output) if stderr == subprocess.STDOUT else _output(stderr)
        started, has_started = context.Pipe(duplex=False)
        output = (DupFd(standard_output), DupFd(standard_error))
        arguments = (has_started, list(command[2:]), str(cwd or Path.cwd()), dict(env), output)
        self._process = context.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        for own_end, end in ((self.stdout, standard_output), (self.stderr, standard_error)):
            if own_end is not None:
                os.close(end)
        has_started.close()
        started.recv()  # from here on the process has a session, and with it a process group, of its own
        started.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def warm_starts() -> Iterator[None]:
    """Within this context ranks are forked where they can be: `python -m MODULE` with one thread."""
    with _LOCK, patch.object(local, "subprocess", SimpleNamespace(Popen=start, **_CONSTANTS)):
        yield


_LOCK = threading.RLock()  # `tools/parity/layouts.py` starts jobs from several threads
_CONSTANTS = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}


def start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:
    """Fork the server if the command and the environment allow it; otherwise start a process anew.

    Args:
        options: those of `subprocess.Popen` that `ForkedProcess` takes.
    """
    if (
        os.environ.get("ERNIEKIT_COLD_RANKS")
        or list(command[:2]) != [sys.executable, "-m"]
        or any(env.get(name, value) != value for name, value in SERVER_VARIABLES.items())
        or any(name.startswith("FLAGS_") for name in env)
    ):
        return subprocess.Popen(command, env=env, **options)
    return ForkedProcess(command, env=env, **options)


@cache
def _server() -> ForkServerContext:
    """Start the server of this process; it ends with it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.warm_imports"])
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
    with patch.dict(os.environ, {**SERVER_VARIABLES, **QUIET, "PYTHONPATH": paths}):
        ensure_running()
    return context


def _output(target: int | io.IOBase) -> tuple[BinaryIO | None, int]:
    """Our end of a pipe, if one is asked for, and the descriptor for the process."""
    if target == subprocess.PIPE:
        ours, theirs = os.pipe()
        return open(ours, "rb"), theirs
    assert isinstance(target, io.IOBase)
    return None, target.fileno()


def _become(
    has_started: Any, words: Sequence[str], cwd: str, environment: Mapping[str, str], output: tuple[DupFd, DupFd]
) -> None:
    """Be `python -m WORDS`, in the forked process."""
    os.setsid()
    has_started.send(None)
    has_started.close()
    for target, source in zip((1, 2), output, strict=True):
        os.dup2(source.detach(), target)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(environment)
    if LAUNCHER in os.environ:
        os.environ[LAUNCHER] = str(os.getppid())  # the server, which ends with the launcher
    os.chdir(cwd)
    module, *sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)
