"""`erniekit docs [--check]`: the reference pages from the declarations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def run(arguments: list[str]) -> int:
    """Write the pages, or with --check list those that are out of date and return 1."""
    parser = argparse.ArgumentParser(
        prog="erniekit docs",
        description="Write the reference of all parameters: an index, a page for each section, a schema for editors.",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/parameters"), metavar="DIR", help="default %(default)s"
    )
    options = parser.parse_args(arguments)

    from erniekit.parameters.reference_docs import pages

    wanted = pages()
    if options.check:
        stale = _stale(options.output, wanted)
        for name in stale:
            print(f"{options.output / name} is out of date; run `erniekit docs`", file=sys.stderr)
        return 1 if stale else 0
    options.output.mkdir(parents=True, exist_ok=True)
    changed = _stale(options.output, wanted)
    for name in changed:
        if name in wanted:
            (options.output / name).write_text(wanted[name], encoding="utf-8")
        else:
            (options.output / name).unlink()
    print(f"{options.output}: {len(wanted)} files, {len(changed)} changed")
    return 0


def _stale(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Files whose content differs, that are missing, or that are no longer generated."""
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*")) if path.is_file()}
    return [name for name in sorted({*wanted, *found}) if found.get(name) != wanted.get(name)]
