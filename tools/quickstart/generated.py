"""Write generated files, or check that the ones on disk are what would be generated."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(files: dict[Path, str], *, check: bool) -> int:
    """Write `files` (path -> text), or with `check` only compare them; returns the exit code, 1 when one is stale."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check:
        for path in stale:
            print(f"stale: {path}; generate it again with python {sys.argv[0]}", file=sys.stderr)
        return 1 if stale else 0
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text) // 1024} KiB")
    return 0
