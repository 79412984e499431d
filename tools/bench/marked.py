"""Tables that commands write into a document, between marks: `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXACTNESS, ESTIMATES = ROOT / "docs/exactness.md", ROOT / "docs/layout-estimates.md"
BENCHMARKS = ROOT / "docs/benchmarks.md"


def with_table(name: str, table: str, document: Path) -> str:
    """Return the text of a document with another table between its marks."""
    before, _, after = _around(name, document)
    begin, end = _marks(name)
    return f"{before}{begin}\n{table}\n{end}{after}"


def table_of(name: str, document: Path) -> str:
    """Return the table between the marks of a document."""
    return _around(name, document)[1].strip("\n")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def _around(name: str, document: Path) -> tuple[str, str, str]:
    """Return what stands before, between and after the marks."""
    begin, end = _marks(name)
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    table, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{document} does not hold the marks {begin} and {end}")
    return before, table, after


def commit() -> str:
    """The commit that is measured; "+" where the package differs from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "erniekit") else "")


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def measured_at(command: str, others: Sequence[str] = ()) -> str:
    """A sentence for below a table: command, commit, date, versions.

    Args:
        command: what makes the table anew.
        others: versions of what is not in this environment, such as "torch 2.13.0".
    """
    own = [f"{name} {metadata.version(name)}" for name in ("paddlepaddle", "numpy")]
    versions = ", ".join([f"Python {platform.python_version()}", *own, *others])
    return f"`{command}` at `{commit()}`, {today()}; {versions}."


def versions_in(python: Path, *packages: str) -> list[str]:
    """What `measured_at` takes of another environment, such as ["torch 2.13.0"]."""
    program = f"from importlib.metadata import version\nfor name in {packages}: print(name, version(name))"
    done = subprocess.run([str(python), "-I", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()
