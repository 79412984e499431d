"""Start the ranks of one job as processes on this machine, collect what they return, and end all of them together.

    results = run_ranks(case, 2, width=8)      # case(width=8) in each of 2 processes; what each returned (JSON)

`case` is a function at the top of an importable module. A job ends with its last rank, its first failing rank, or its
time: whatever happens, no process is left, and the failure shows the first real traceback with its rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONSEQUENCES = ("RankLostError",)  # exceptions of a rank that has only noticed another's end
GRACE = 2.0  # seconds for the others to notice a rank's end and say what they saw
SHOWN = 60  # lines of a rank's standard error


class RanksFailedError(AssertionError):
    """A rank failed, or the job took too long."""


def run_ranks(
    case: Callable, count: int, *, timeout: float = 120.0, environment: dict[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Run `case(**arguments)` in `count` ranks.

    Args:
        case: found again by its module and name; arguments and results must be JSON.
        timeout: seconds for the whole job.
        environment: more variables for every rank.

    Raises:
        RanksFailedError: naming the rank that failed first by itself, with the end of its standard error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = _start(case, count, folder, timeout, environment or {}, arguments)
        try:
            _wait(processes, folder, timeout)
        finally:
            _end(processes)
        return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]


def _start(
    case: Callable, count: int, folder: Path, timeout: float, environment: dict[str, str], arguments: dict[str, Any]
) -> list[subprocess.Popen]:
    port = _free_port()
    endpoints = [f"127.0.0.1:{port + rank}" for rank in range(count)]  # names; only the first is listened on
    job = json.dumps({"case": f"{case.__module__}:{case.__qualname__}", "arguments": arguments, "timeout": timeout})
    processes = []
    for rank in range(count):
        variables = {
            "OMP_NUM_THREADS": "1",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(count),
            "PADDLE_MASTER": endpoints[0],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.parallel.rank_main", job, str(folder / f"{rank}.json")],
                    cwd=ROOT,
                    env={**os.environ, **variables, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,  # so that what a rank starts ends with it
                )
            )
    return processes


def _wait(processes: list[subprocess.Popen], folder: Path, timeout: float) -> None:
    """Return when all have ended well; raise when one has not, or when time is up."""
    ends = time.monotonic() + timeout
    failed: list[int] = []  # in order of their ends
    while None in [process.poll() for process in processes]:
        failed += [rank for rank, process in enumerate(processes) if process.returncode and rank not in failed]
        if failed:
            ends = min(ends, time.monotonic() + GRACE) if len(failed) == 1 else ends
            if time.monotonic() > ends or len(failed) == len(processes):
                break
        elif time.monotonic() > ends:
            running = [rank for rank, process in enumerate(processes) if process.returncode is None]
            raise RanksFailedError(
                f"ranks {running} of {len(processes)} had not ended after {timeout:g} s\n" + _said(running[0], folder)
            )
        time.sleep(0.02)
    failed += [rank for rank, process in enumerate(processes) if process.returncode and rank not in failed]
    if failed:
        first = next((rank for rank in failed if not _is_a_consequence(rank, folder)), failed[0])
        raise RanksFailedError(
            f"rank {first} of {len(processes)} failed with exit code {processes[first].returncode}\n"
            + _said(first, folder)
        )


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # the rank and all that it started have ended
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _is_a_consequence(rank: int, folder: Path) -> bool:
    lines = [line for line in _standard_error(rank, folder).splitlines() if line and not line[0].isspace()]
    return any(name in line.partition(":")[0] for line in lines[-3:] for name in CONSEQUENCES)


def _said(rank: int, folder: Path) -> str:
    return "\n".join(f"[rank {rank}] {line}" for line in _standard_error(rank, folder).splitlines()[-SHOWN:])


def _standard_error(rank: int, folder: Path) -> str:
    return (folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
