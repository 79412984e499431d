"""Write the tables of names in docs/migrating.md from the names that ERNIEKit knows of other suites.

Usage: python tools/migrating.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/quickstart")]

from generated import write_or_check  # noqa: E402

from erniekit.config.foreign import FOREIGN_NAMES  # noqa: E402
from erniekit.config.foreign_names import SUITES, ForeignName  # noqa: E402
from erniekit.config.values import format_value  # noqa: E402

PAGE = ROOT / "docs/migrating.md"


def page() -> str:
    """Return the text of the page with fresh tables."""
    text = PAGE.read_text(encoding="utf-8")
    for suite in SUITES:
        begin, end = f"<!-- {suite}: begin -->\n", f"\n<!-- {suite}: end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table(suite) + end + rest.partition(end)[2]
    return text


def table(suite: str) -> str:
    """Return a Markdown table of the names of a suite; names with the same answer share a row."""
    names: dict[str, list[str]] = {}
    for name, foreign in sorted(FOREIGN_NAMES.items()):
        if suite in foreign.suites:
            names.setdefault(_here(foreign), []).append(f"`{name}`")
    rows = (f"| {', '.join(there)} | {here} |" for here, there in names.items())
    return "\n".join(["| name there | here |", "|---|---|", *rows])


def _here(foreign: ForeignName) -> str:
    if foreign.word:
        return f"`{foreign.word}`"
    if not foreign.values:
        return ("no effect: " if foreign.read else "") + foreign.why
    parts = [
        f"`{format_value(value)}`: "
        + (", ".join(f"`{name}: {format_value(meant)}`" for name, meant in names.items()) or "done anyway")
        for value, names in foreign.values.items()
    ]
    return "; ".join([*parts, f"else {foreign.why}"] if foreign.why else parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    return write_or_check({PAGE: page()}, check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
