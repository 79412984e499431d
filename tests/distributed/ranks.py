"""Start the ranks of one job as processes on this machine, collect what they return, and end all of them together.

    results = run_ranks(case, 2, width=8)      # case(width=8) in each of 2 processes; what each returned (JSON)

`case` is a function at the top of an importable module. A job ends with its last rank, its first failing rank, or its
time: whatever happens, no process is left, and the failure shows the first real traceback with its rank. The processes
are started and watched as `erniekit train` starts and watches its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from erniekit.launch.local import RankProcesses, spawn
from erniekit.launch.watch import root_cause, watch
from tests.distributed.warm_processes import warm_starts

ROOT = Path(__file__).parents[2]


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
        RanksFailedError: naming the rank that failed first by itself, with its traceback.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, ends = Path(name), time.monotonic() + timeout
        ranks = start_ranks(case, count, folder, environment=environment, **arguments)
        try:
            failures = watch(ranks, keep_waiting=lambda: time.monotonic() < ends)
            if failures:
                raise RanksFailedError(str(root_cause(failures)))
            if ranks.running:
                rank, here = next(iter(ranks.stacks(ranks.running).items()))
                raise RanksFailedError(
                    f"ranks {ranks.running} of {count} had not ended after {timeout:g} s; rank {rank} is here:\n{here}"
                )
        finally:
            ranks.kill()
        return [json.loads((folder / f"{rank}.returned").read_text(encoding="utf-8")) for rank in range(count)]


def start_ranks(
    case: Callable,
    count: int,
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> RankProcesses:
    """Start the ranks of `run_ranks` and leave them running; logs, reports and results go to `folder`."""
    job = json.dumps({"case": f"{case.__module__}:{case.__qualname__}", "arguments": arguments, "folder": str(folder)})
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    with warm_starts():
        return spawn(
            count,
            [sys.executable, "-m", "tests.distributed.rank_main", job],
            logs=folder,
            reports=folder,
            show=False,
            cwd=ROOT,
            variables={
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                **(environment or {}),
            },
        )
