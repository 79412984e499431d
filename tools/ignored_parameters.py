#!/usr/bin/env python3
"""Show that the proofs of parameters can fail: ignore each parameter at each place that reads it, in turn; one of the
parameter's proofs, or of the tests that mirror the file that reads it, must notice.

    tools/ignored_parameters.py                     every reader, half an hour
    tools/ignored_parameters.py seed beta           the readers of these parameters
    tools/ignored_parameters.py build/data.py       the readers in a file
    tools/ignored_parameters.py --sample 8          eight readers, drawn anew every day (`make check-proofs`)
    tools/ignored_parameters.py --sample 8 --draw 7  the same eight again

At that place the parameter has its default, whatever the user writes. The tests run in forks of a process that has
Paddle imported, the quick ones first, and the processes that they start ignore the parameter as well. A test that
fails is run again with nothing ignored, and must pass. Left out are parameters without a default and presets, which act
while the configuration is worked out, readers that cannot be noticed, with the reason (`UNNOTICEABLE`), and those that
no test proves yet (ignored/unproved.txt, which may only shrink).
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from parameter_audit import ROOT, Reader, find_readers, modules_below, proofs

from erniekit.config.registry import PARAMETERS

HOOK = Path(__file__).parent / "ignored"
UNPROVED = HOOK / "unproved.txt"
TIMEOUT = 300  # seconds that the tests of one reader may take
NOTICED, UNNOTICED, NO_TESTS = 1, 0, 5  # exit codes of pytest

# Readers, as "file parameter", that no test can tell from one that ignores the parameter.
UNNOTICEABLE: dict[str, str] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME | FILE", help="parameters, or ends of files that read them")
    parser.add_argument("--sample", type=int, help="how many readers to draw; all by default")
    parser.add_argument("--draw", type=int, default=datetime.date.today().toordinal(), help="the seed of the sample")
    parser.add_argument("--select", default="not exhaustive", help="the marks of tests that run, as pytest's -m has it")
    parser.add_argument("--wide", action="store_true", help="also run every file of tests that names the parameter")
    parser.add_argument("--unproved", action="store_true", help="also the readers of ignored/unproved.txt")
    parser.add_argument("--jobs", type=int, default=2, help="how many readers are tried at the same time")
    options = parser.parse_args()
    every = readers_of(PARAMETERS, unproved=options.unproved)
    words = tuple(options.words)
    readers = [(name, reader) for name, reader in every if not words or name in words or reader.path.endswith(words)]
    if not readers:
        parser.error(f"nothing reads {' or '.join(words)}")
    if options.sample:
        readers = random.Random(options.draw).sample(readers, min(options.sample, len(readers)))
        print(f"{len(readers)} of {len(every)} readers, --draw {options.draw}")
    results = try_all(readers, options.select, wide=options.wide, jobs=options.jobs)
    failures = [
        f"{_shown(*item)}: {result}" for item, result in zip(readers, results, strict=True) if result != "noticed"
    ]
    for line in failures:
        print(f"error: {line}", file=sys.stderr)
    return 1 if failures else 0


def readers_of(names: Iterable[str], *, unproved: bool = False) -> list[tuple[str, Reader]]:
    """Return each reader of the parameters that have a default to fall back to.

    Args:
        unproved: also those that no test proves yet.
    """
    found = _found()
    able = [
        name
        for name in names
        if PARAMETERS[name].devices and not PARAMETERS[name].required_for and not PARAMETERS[name].stands_for
    ]
    left_out = {*UNNOTICEABLE, *(() if unproved else unproved_readers())}
    return [
        (name, reader) for name in able for reader in found.get(name, []) if f"{reader.path} {name}" not in left_out
    ]


@cache
def _found() -> dict[str, list[Reader]]:
    return find_readers(modules_below(ROOT))


def unproved_readers() -> list[str]:
    """Return the readers that no test proves yet, as "file parameter"."""
    lines = UNPROVED.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def try_all(readers: Sequence[tuple[str, Reader]], select: str, *, wide: bool = False, jobs: int = 1) -> list[str]:
    """Ignore a parameter at each reader in turn, and print what came of it: "noticed", or what to do about it."""
    servers: SimpleQueue[Server] = SimpleQueue()
    started = [Server(readers) for _ in range(min(jobs, len(readers)))]
    for server in started:
        servers.put(server)

    def result_of(item: tuple[str, Reader]) -> str:
        server = servers.get()
        try:
            result = server.run_ignoring(*item, tests_of(*item, wide=wide), select)
        finally:
            servers.put(server)
        print(f"{_shown(*item)}: {result}", flush=True)
        return result

    try:
        with ThreadPoolExecutor(len(started)) as pool:
            return list(pool.map(result_of, readers))
    finally:
        for server in started:
            server.close()


def _shown(name: str, reader: Reader) -> str:
    return f"{name} at {reader.path}:{reader.line}:{reader.column}"


class Server:
    """A process that runs tests in its forks, each ignoring a parameter at another reader (`ignored/forks.py`)."""

    def __init__(self, readers: Iterable[tuple[str, Reader]]) -> None:
        paths = [str(HOOK), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, str(HOOK / "forks.py")],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._write([_described(name, reader) for name, reader in readers])

    def _write(self, message: Any) -> None:
        assert self._process.stdin
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def _run(self, ignored: dict[str, Any] | None, tests: Sequence[str], select: str) -> dict[str, Any]:
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", select, *tests]
        self._write({"reader": ignored, "arguments": arguments, "timeout": TIMEOUT})
        assert self._process.stdout
        return dict(json.loads(self._process.stdout.readline()))

    def run_ignoring(self, name: str, reader: Reader, tests: Sequence[str], select: str) -> str:
        """Run tests with a parameter ignored at one place; return "noticed", or why that is not so."""
        answer = self._run(_described(name, reader), tests, select)
        if answer["code"] is None:  # a run that waits for ever is no run that passes
            return "noticed"
        if answer["code"] in (UNNOTICED, NO_TESTS):
            return "can be ignored: no proof of the parameter and no test that mirrors the file fails"
        if answer["code"] != NOTICED:
            return f"pytest ended with {answer['code']}: {answer['said']}"
        if self._run(None, [answer["failed"]], select)["code"] != UNNOTICED:
            return f"{answer['failed']} fails with nothing ignored, too"
        return "noticed"

    def close(self) -> None:
        """End the process, and wait for it."""
        self._process.communicate()


def _described(name: str, reader: Reader) -> dict[str, Any]:
    """A reader as `ignored/sitecustomize.py` wants it."""
    module = reader.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    position = [reader.line, reader.column, reader.end_line, reader.end_column]
    return {"name": name, "module": module, "position": position}


def tests_of(name: str, reader: Reader, *, wide: bool = False) -> list[str]:
    """The proofs of a parameter and the tests that mirror the file of its reader, as pytest names them."""
    return list(dict.fromkeys([*proofs_of(name), *mirrors_of(reader), *(files_that_name(name) if wide else [])]))


@cache
def _proofs() -> dict[str, list[str]]:
    return proofs(ROOT)


def proofs_of(name: str) -> list[str]:
    """Return the proofs of a parameter, as pytest names them."""
    return [_named(location) for location in _proofs()[name]]


def mirrors_of(reader: Reader) -> list[str]:
    """Return the files of tests whose names begin as the file that reads does, or its folder, where those belong."""
    path = Path(reader.path).relative_to("erniekit")
    files = []
    for folder in path.parents:
        for name in (path.stem, path.parent.name):
            here = ROOT / "tests" / folder
            files += [here / f"test_{name}.py", *sorted(here.glob(f"test_{name}_*.py"))]
    return [str(file) for file in dict.fromkeys(files) if file.is_file()]


def _named(location: str) -> str:
    path, _, line = location.rpartition(":")
    functions = (node for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
                 if isinstance(node, ast.FunctionDef))  # fmt: skip
    return f"{ROOT / path}::{next(node.name for node in functions if node.lineno == int(line))}"


def files_that_name(name: str) -> list[str]:
    """Return the files of tests that write the name of the parameter, the shortest first."""
    named = re.compile(rf"\b{name}\b")
    files = (path for path in (ROOT / "tests").rglob("test_*.py") if named.search(path.read_text(encoding="utf-8")))
    return [str(path) for path in sorted(files, key=lambda path: (path.stat().st_size, str(path)))]


if __name__ == "__main__":
    sys.exit(main())
