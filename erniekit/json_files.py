"""Read the JSON files of model folders and checkpoints, if they are still what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.manifest import refuse_changed


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ModelFileError: there is none, or the folder's manifest lists small files that have changed.
    """
    refuse_changed(path.parent)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: cannot be read as JSON: brackets nested too deeply") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values
