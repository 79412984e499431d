"""Small files that are written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, numbers and words or mappings of them, as JSON and rename it into place."""
    atomic_write_text(path, json.dumps(nan_to_none(content), indent=2, allow_nan=False) + "\n")


def nan_to_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with None in the place of NaN and infinities, which JSON does not know."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return nan_to_none(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in content.items()}


def atomic_write_text(path: Path, text: str) -> None:
    """Give `path` this content at once: a reader sees the old text or the new one, also after a loss of power."""
    temp_path = path.with_name(f".{path.name}.tmp")
    with temp_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the new name may reach the disk before the content
    os.replace(temp_path, path)
