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
from collections.abc import Iterable
from pathlib import Path

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


def run_ignoring(name: str, reader: Reader, select: str = "not exhaustive", *, wide: bool = False) -> str:
    """Run the proofs of a parameter, ignored at one place; return "noticed", "NOT NOTICED" or what went wrong."""
    module = reader.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    position = [reader.line, reader.column, reader.end_line, reader.end_column]
    environment = os.environ | {
        "ERNIEKIT_IGNORED": json.dumps({"name": name, "module": module, "position": position}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", select]
    for tests in (proofs_of(name), mirrors_of(reader), files_that_name(name) if wide else []):
        if not tests:
            continue
        try:
            run = subprocess.run(
                [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return "noticed"  # a run that waits for ever is no run that passes
        if run.returncode == NOTICED:
            return "noticed"
        if run.returncode not in (UNNOTICED, NO_TESTS):
            return f"pytest ended with {run.returncode}: {run.stdout[-500:]}{run.stderr[-500:]}"
    return "NOT NOTICED"


def proofs_of(name: str) -> list[str]:
    """Return the proofs of a parameter, as pytest names them."""
    return [_named(location) for location in proofs(ROOT)[name]]


def mirrors_of(reader: Reader) -> list[str]:
    """Return the files of tests that bear the name of the file that reads, in the folder that mirrors its own."""
    path = Path(reader.path).relative_to("erniekit")
    folders = [ROOT / "tests" / path.parent, *(ROOT / "tests" / parent for parent in path.parent.parents)]
    return [str(file) for folder in folders if (file := folder / f"test_{path.stem}.py").is_file()]


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
