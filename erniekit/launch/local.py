"""The ranks of one machine as processes: their variables, their output, and that none outlives the job.

No Paddle.
"""

from __future__ import annotations

import codecs
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import BinaryIO, TextIO

from erniekit.distributed.rank import DUMP_STACKS_SIGNAL, LAUNCHER, REPORT, FailureReport, stacks_path

OWN_PORTS = range(20_000, 32_000)  # below those that Linux, macOS and IANA give away
NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU
STORE_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")  # of a job around this one; Paddle prefers them to PADDLE_MASTER


def visible_gpus(driver: Path = NVIDIA_DRIVER) -> int:
    """The number of GPUs that Paddle would see here: 0 without a build for GPUs; CUDA_VISIBLE_DEVICES selects some."""
    try:
        metadata.version("paddlepaddle-gpu")
    except metadata.PackageNotFoundError:
        return 0
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([name for name in chosen.split(",") if name.strip() not in ("", "-1")]))


def rank_variables(rank: int, endpoints: Sequence[str], *, gpu: bool) -> dict[str, str]:
    """Return the variables by which Paddle and ERNIEKit know that they are a rank of this machine.

    Args:
        endpoints: host:port of every rank. Ranks meet at the first; the others only name hosts.
    """
    device = {"FLAGS_selected_gpus": str(rank)} if gpu else {"PADDLE_DISTRI_BACKEND": "gloo"}
    return device | {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_LOCAL_SIZE": str(len(endpoints)),
        "PADDLE_MASTER": endpoints[0],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }


def free_port(host: str) -> int:
    """A port that nothing listens on; host "": on any address of this machine.

    The kernel hands out ports above `OWN_PORTS` to whoever asks for any, so that one of those may be taken before the
    ranks have started.
    """
    for port in random.SystemRandom().sample(OWN_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RankExit:
    """A rank that is no more.

    Attributes:
        code: its exit code; minus the signal, where one ended it.
        report: what it said of its failure, if it could.
    """

    rank: int
    code: int
    report: FailureReport | None = None


@dataclass
class RankProcesses:
    """The running ranks of this machine; see `spawn`."""

    processes: dict[int, subprocess.Popen[bytes]]
    logs: Path
    reports: Path
    output_threads: Sequence[threading.Thread] = ()
    ended: dict[int, RankExit] = field(default_factory=dict)  # in the order in which they were seen to end

    @property
    def running(self) -> list[int]:
        """The ranks that had not ended when `look` was last called."""
        return [rank for rank in self.processes if rank not in self.ended]

    def poll(self) -> None:
        """Note the ranks that have ended."""
        for rank in self.running:
            code = self.processes[rank].poll()
            if code is None:
                continue
            ended = self.ended[rank] = RankExit(rank, code, FailureReport.read(_report_path(self.reports, rank)))
            if ended.report is not None:
                with rank_log_path(self.logs, rank).open("a", encoding="utf-8") as log:
                    log.write(f"{ended.report.text}\n")

    def send_signal(self, number: int) -> None:
        """Send a signal to every running rank."""
        for rank in self.running:
            self.processes[rank].send_signal(number)

    def stacks(self, ranks: Sequence[int], timeout: float = 1.0) -> dict[int, str]:
        """Where the threads of running ranks are; "" for a rank that cannot say, such as a stopped one."""
        before = {rank: _size(self._stacks(rank)) for rank in ranks}
        for rank in ranks:
            if before[rank] >= 0:  # otherwise it has not begun, and the signal would end it
                self.processes[rank].send_signal(DUMP_STACKS_SIGNAL)
        time.sleep(timeout)
        return {rank: _tail(self._stacks(rank), before[rank]) for rank in ranks}

    def kill(self) -> None:
        """End every rank with all that it has started, and wait until they are gone and all output is shown."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):  # the rank and all that it started have ended
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.poll()
        for thread in self.output_threads:
            thread.join(timeout=1.0)  # longer only where a process that left the rank's session holds its output

    def _stacks(self, rank: int) -> Path:
        return stacks_path(_report_path(self.reports, rank))


def spawn(
    nproc: int,
    command: Sequence[str],
    *,
    logs: Path,
    reports: Path,
    gpu: bool = False,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    show: bool = True,
) -> RankProcesses:
    """Start `command` once for each of `nproc` ranks on this machine.

    Args:
        logs: an existing folder; what rank 3 writes to standard output and error is appended to `rank-3.log`.
        reports: an existing, empty folder for what failing ranks say.
        gpu: every rank has a GPU of its own.
        variables: more variables for every rank.
        show: write what rank 0 writes to this process's standard output and error, too.
    """
    inherited_environment = {name: value for name, value in os.environ.items() if name not in STORE_VARIABLES}
    port = free_port("127.0.0.1")
    endpoints = [f"127.0.0.1:{port + rank}" for rank in range(nproc)]
    processes: dict[int, subprocess.Popen[bytes]] = {}
    output_threads: list[threading.Thread] = []
    ranks = RankProcesses(processes, logs, reports, output_threads)
    with ExitStack() as undo:  # a rank that cannot be started ends those that were
        undo.callback(ranks.kill)
        for rank in range(nproc):
            own = {
                "PYTHONUNBUFFERED": "1",  # what a rank wrote before it was killed is in its log
                "PYTHONFAULTHANDLER": "1",  # a crash of native code shows where
                LAUNCHER: str(os.getpid()),
                REPORT: str(_report_path(reports, rank)),
            }
            is_shown = show and rank == 0
            with rank_log_path(logs, rank).open("ab") as log:
                process = subprocess.Popen(
                    list(command),
                    cwd=cwd,
                    env=inherited_environment | rank_variables(rank, endpoints, gpu=gpu) | own | dict(variables or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if is_shown else log,
                    stderr=subprocess.PIPE if is_shown else log,
                    start_new_session=True,  # what it starts can be ended with it, and Ctrl-C reaches it through us
                )
            processes[rank] = process
            for source, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)) if is_shown else ():
                assert source is not None
                thread = threading.Thread(target=_tee, args=(source, stream, rank_log_path(logs, rank)), daemon=True)
                thread.start()
                output_threads.append(thread)
        undo.pop_all()
    return ranks


def rank_log_path(logs: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return logs / f"rank-{rank}.log"


def _report_path(reports: Path, rank: int) -> Path:
    return reports / f"{rank}.json"


def _tee(source: BinaryIO, stream: TextIO, log: Path) -> None:
    """Write what comes to a stream as it comes, and to a log by whole lines, because another stream goes there, too."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    line = b""
    with source, log.open("ab", buffering=0) as file:
        while data := os.read(source.fileno(), 1 << 16):
            complete_lines, newline, rest = (line + data).rpartition(b"\n")
            file.write(complete_lines + newline)
            line = rest
            with suppress(OSError, ValueError):  # a run outlives the reader of its progress
                stream.write(decoder.decode(data))
                stream.flush()
        file.write(line)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def _tail(path: Path, start: int) -> str:
    if start < 0:
        return ""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace").strip()
