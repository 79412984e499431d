"""`erniekit docs [--check]`: write the parameter reference from the declarations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from erniekit.errors import ConfigurationError


def run(arguments: list[str]) -> int:
    """Write the pages; with --check, list the pages that are out of date and return 1 if there are any.

    Raises:
        ConfigurationError: a page would replace a file that this verb did not write, or the folder cannot be written.
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

    from erniekit.config.reference_docs import pages

    expected = pages()
    if options.check:
        stale = _stale(options.output, expected)
        for name in stale:
            print(f"{options.output / name} is out of date; run `erniekit docs`", file=sys.stderr)
        return 1 if stale else 0
    try:
        changed = _write(options.output, expected)
    except OSError as error:
        raise ConfigurationError(
            f"{options.output}: cannot be written: {error.strerror}; name a folder with --output"
        ) from None
    print(f"{options.output}: {len(expected)} files, {changed} changed")
    return 0


def _write(folder: Path, expected: dict[str, str]) -> int:
    """Update the folder and return the number of files that changed."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = _stale(folder, expected)
    user_files = [name for name in changed if _exists(folder / name) and not _is_generated(folder / name)]
    if user_files:
        raise ConfigurationError(
            f"{folder}: {', '.join(user_files)}: not written by `erniekit docs`, so not replaced\n"
            "  Move or remove what you do not need, or name another folder with --output."
        )
    for name in changed:
        if name in expected:
            (folder / name).write_text(expected[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return len(changed)


def _stale(folder: Path, expected: dict[str, str]) -> list[str]:
    """Return the files whose content differs, that are missing, or that were generated once and no longer are."""
    names = [name for name, text in expected.items() if not _has_content(folder / name, text)]
    names += [path.name for path in folder.glob("*") if path.name not in expected and _is_generated(path)]
    return sorted(names)


def _has_content(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_generated(path: Path) -> bool:
    """Return whether a file begins with the mark of this verb; all other files in the folder belong to the user."""
    from erniekit.config.json_schema import MARK

    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(400)
