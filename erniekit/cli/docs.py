"""`erniekit docs [--check]`: the reference pages from the declarations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from erniekit.errors import ConfigurationError


def run(arguments: list[str]) -> int:
    """Write the pages, or with --check list those that are out of date and return 1.

    Raises:
        ConfigurationError: a page would replace a file that somebody else wrote, or the folder cannot be written.
    """
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
    try:
        changed = _write(options.output, wanted)
    except OSError as error:
        raise ConfigurationError(
            f"{options.output}: cannot be written: {error.strerror}; name a folder with --output"
        ) from None
    print(f"{options.output}: {len(wanted)} files, {changed} changed")
    return 0


def _write(folder: Path, wanted: dict[str, str]) -> int:
    """Bring the folder up to date; returns how many files changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = _stale(folder, wanted)
    foreign = [name for name in changed if _exists(folder / name) and not _is_generated(folder / name)]
    if foreign:
        raise ConfigurationError(
            f"{folder}: {', '.join(foreign)}: not written by `erniekit docs`, so not replaced\n"
            "  Move or remove what you do not need, or name another folder with --output."
        )
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return len(changed)


def _stale(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Files whose content differs, that are missing, or that were generated once and no longer are."""
    names = [name for name, text in wanted.items() if not _holds(folder / name, text)]
    names += [path.name for path in folder.glob("*") if path.name not in wanted and _is_generated(path)]
    return sorted(names)


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_generated(path: Path) -> bool:
    """Whether a file begins with the mark of this verb; others in the folder are the user's and left alone."""
    from erniekit.parameters.json_schema import GENERATED_BY

    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATED_BY.encode() in file.read(400)
