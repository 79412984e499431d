#!/usr/bin/env python3
"""Whether the proofs of parameters can fail: each parameter is ignored in turn, and one of its proofs must notice.

    tools/ignored_parameters.py               every parameter whose proofs need one process only, 10 minutes
    tools/ignored_parameters.py seed beta     these

A parameter that is ignored has its default, whatever the user writes; its rules are checked as ever. Left out are those
without a default, presets, which act while the configuration is worked out, and those whose verb comes later.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from parameter_audit import ROOT, proofs

from erniekit.config import config as configuration
from erniekit.config.registry import PARAMETERS
from erniekit.environment import apply_cpu_settings, import_paddle


class Outcome:
    """A pytest plugin that counts tests."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed += report.failed
        self.passed += report.passed and report.when == "call"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *PARAMETERS], metavar="NAME")
    names = parser.parse_args().names or [
        name
        for name, parameter in PARAMETERS.items()
        if parameter.devices and not parameter.required_for and not parameter.stands_for
    ]
    apply_cpu_settings(threads=1)
    import_paddle()
    unnoticed = []
    for name, tests in tests_of(names).items():
        outcome = run_ignoring(name, tests)
        found = "noticed" if outcome.failed else "NOT NOTICED" if outcome.passed else "needs other processes"
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        unnoticed += [name] if found == "NOT NOTICED" else []
    print(f"ignored without notice: {', '.join(unnoticed) or 'none'}", file=sys.stderr)
    return 1 if unnoticed else 0


def tests_of(names: list[str]) -> Mapping[str, list[str]]:
    """The proofs of each parameter, as pytest names them."""
    locations = proofs(ROOT)
    return {name: [_named(location) for location in locations[name]] for name in names}


def _named(location: str) -> str:
    path, _, line = location.rpartition(":")
    functions = (node for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
                 if isinstance(node, ast.FunctionDef))  # fmt: skip
    return f"{ROOT / path}::{next(node.name for node in functions if node.lineno == int(line))}"


def run_ignoring(name: str, tests: list[str]) -> Outcome:
    """Run tests while every configuration has the default of a parameter, until one of them fails."""
    resolve, outcome = configuration.resolve, Outcome()

    def resolve_ignoring(*arguments: Any) -> Any:
        builder = resolve(*arguments)
        builder.set_silently(name, builder._defaults[name])
        return builder

    configuration.resolve = resolve_ignoring  # type: ignore[assignment]
    try:
        pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not distributed", *tests], plugins=[outcome])
    finally:
        configuration.resolve = resolve
    return outcome


if __name__ == "__main__":
    sys.exit(main())
