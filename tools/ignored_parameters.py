#!/usr/bin/env python3
"""Show that the proofs of parameters can fail: ignore each parameter at each place that reads it, in turn; one of the
parameter's proofs, or of the tests that mirror the file that reads it, must notice.

    tools/ignored_parameters.py                     every reader, an hour
    tools/ignored_parameters.py seed beta           the readers of these parameters
    tools/ignored_parameters.py --sample 10         ten readers, drawn anew every day; what CI runs
    tools/ignored_parameters.py --sample 10 --draw 7  the same ten again

At that place the parameter has its default, whatever the user writes. The tests run in a process of their own, and the
processes that they start ignore the parameter as well. Left out are parameters without a default and presets, which act
while the configuration is worked out, and readers that cannot be noticed, with the reason (`UNNOTICEABLE`).
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
from pathlib import Path
from typing import Any

from parameter_audit import ROOT, Reader, find_readers, modules_below, proofs

from erniekit.config.registry import PARAMETERS

HOOK = Path(__file__).parent / "ignored"
TIMEOUT = 300  # seconds that the proofs of one parameter may take
NOTICED, UNNOTICED, NO_TESTS = 1, 0, 5  # exit codes of pytest

# Readers, as "file parameter", that no test can tell from one that ignores the parameter.
UNNOTICEABLE: dict[str, str] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PARAMETERS], metavar="NAME")
    parser.add_argument("--sample", type=int, help="how many readers to draw; all by default")
    parser.add_argument("--draw", type=int, default=datetime.date.today().toordinal(), help="the seed of the sample")
    parser.add_argument("--select", default="not exhaustive", help="the marks of tests that run, as pytest's -m has it")
    parser.add_argument("--wide", action="store_true", help="also run every file of tests that names the parameter")
    options = parser.parse_args()
    readers = readers_of(options.names or PARAMETERS)
    if options.sample:
        readers = random.Random(options.draw).sample(readers, min(options.sample, len(readers)))
        print(f"{len(readers)} readers, --draw {options.draw}")
    unnoticed = []
    for name, reader in readers:
        result = run_ignoring(name, reader, options.select, wide=options.wide)
        where = f"{name} at {reader.path}:{reader.line}"
        print(f"{where}: {result}", flush=True)
        unnoticed += [where] if result != "noticed" else []
    for where in unnoticed:
        print(f"error: {where} can be ignored without any proof of the parameter failing", file=sys.stderr)
    return 1 if unnoticed else 0


def readers_of(names: Iterable[str]) -> list[tuple[str, Reader]]:
    """Return each reader of the parameters that have a default to fall back to."""
    found = find_readers(modules_below(ROOT))
    able = [
        name
        for name in names
        if PARAMETERS[name].devices and not PARAMETERS[name].required_for and not PARAMETERS[name].stands_for
    ]
    return [
        (name, reader) for name in able for reader in found.get(name, []) if f"{reader.path} {name}" not in UNNOTICEABLE
    ]


class Server:
    """A process with Paddle imported that runs tests in its forks, each ignoring another reader (`ignored/forks.py`)."""

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

    def run_ignoring(self, name: str, reader: Reader, tests: Sequence[str], select: str, timeout: float) -> str:
        """Run tests with a parameter ignored at one place; return "noticed", "NOT NOTICED" or what went wrong."""
        if not tests:
            return "NOT NOTICED"
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "--durations=0", "-m", select, *tests]
        self._write({"reader": _described(name, reader), "arguments": arguments, "timeout": timeout})
        assert self._process.stdout
        answer = json.loads(self._process.stdout.readline())
        if answer["code"] in (NOTICED, None):  # a run that waits for ever is no run that passes
            return "noticed"
        if answer["code"] in (UNNOTICED, NO_TESTS):
            return "NOT NOTICED"
        return f"pytest ended with {answer['code']}: {answer['said']}"

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


def proofs_of(name: str) -> list[str]:
    """Return the proofs of a parameter, as pytest names them."""
    return [_named(location) for location in proofs(ROOT)[name]]


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
