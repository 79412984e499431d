"""Serve runs of tests, each in a fork that has Paddle imported and ignores another parameter.

`tools/ignored_parameters.py` starts this program with sitecustomize.py beside it. The first line of the input is the
list of all readers; each further line asks for one run. The answer is a line with pytest's exit code (null if the run
took too long), the test that failed, and the end of what was printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import sitecustomize

DEAR = ("slow", "distributed")  # marks of tests, the dearest last


class CheapestFirst:
    """Run the tests that take longest last, since most often another one fails before; note the one that fails."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(
            key=lambda item: max((DEAR.index(mark) + 1 for mark in DEAR if item.get_closest_marker(mark)), default=0)
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid, encoding="utf-8")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sitecustomize.prepare(json.loads(sys.stdin.readline()))
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401

    import tests.conftest  # sets the threads before Paddle is imported
    import tests.distributed.warm_imports  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


def run(reader: dict[str, Any] | None, arguments: list[str], timeout: float) -> dict[str, Any]:
    """Run pytest in a fork that ignores a parameter at a reader, or none."""
    with tempfile.TemporaryDirectory(prefix="ignored-") as folder, tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            _become(reader, arguments, Path(folder), output.fileno())
        code = _wait(child, timeout)
        output.seek(0)
        said = output.read().decode(errors="replace")[-2000:]
        note = Path(folder) / "failed"
        return {"code": code, "failed": note.read_text(encoding="utf-8") if note.is_file() else "", "said": said}


def _become(reader: dict[str, Any] | None, arguments: list[str], folder: Path, output: int) -> None:
    """Go on as the run of tests, in a session of its own, with a cache of its own but for compiled kernels."""
    code = 3
    try:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kernels = Path(os.environ.get("ERNIEKIT_CACHE") or "~/.cache/erniekit").expanduser().absolute() / "native"
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "cache").mkdir()
        (folder / "cache" / "native").symlink_to(kernels)
        os.environ["ERNIEKIT_CACHE"] = str(folder / "cache")
        if reader is not None:
            sitecustomize.ignore(reader)
        import pytest

        plugin = CheapestFirst(folder / "failed")
        code = int(pytest.main([*arguments, f"--basetemp={folder / 'base'}"], plugins=[plugin]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(child: int, timeout: float) -> int | None:
    """Return the exit code of a fork; None if it took too long. End what it has left behind."""
    until = time.monotonic() + timeout
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main()
