"""Serve runs of tests, each in a fork that has Paddle imported and ignores another parameter.

`tools/ignored_parameters.py` starts this program with sitecustomize.py beside it. The first line of the input is the
list of all readers; each further line asks for one run. The answer is a line with pytest's exit code (null if the run
took too long) and the end of what it printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import sitecustomize

DEAR = ("slow", "distributed")  # marks of tests, the dearest last


class CheapestFirst:
    """Run the tests that take longest last: most often another one fails before."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: max((rank for rank, mark in enumerate(DEAR, 1)
                                         if item.get_closest_marker(mark)), default=0))  # fmt: skip


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sitecustomize.prepare(json.loads(sys.stdin.readline()))
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    import tests.conftest  # noqa: F401  # the threads, before Paddle
    import tests.distributed.warm_imports  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


def run(reader: dict[str, Any], arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run pytest in a fork that ignores a parameter at a reader."""
    with tempfile.TemporaryDirectory(prefix="ignored-") as folder, tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become(reader, arguments, Path(folder), output.fileno())
        code = _wait(child, timeout)
        output.seek(0)
        return {"code": code, "said": output.read().decode(errors="replace")[-800:]}


def _become(reader: dict[str, Any], arguments: list[str], folder: Path, output: int) -> None:
    """Go on as the run of tests, in a session of its own, with a cache of its own."""
    code = 3
    try:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["ERNIEKIT_CACHE"] = str(folder / "cache")
        sitecustomize.ignore(reader)
        import pytest

        code = int(pytest.main([*arguments, f"--basetemp={folder / 'base'}"], plugins=[CheapestFirst()]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, timeout: float) -> int | None:
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    finally:
        try:
            os.killpg(child, signal.SIGKILL)  # also what a run has left behind
        except ProcessLookupError:
            pass
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main()
