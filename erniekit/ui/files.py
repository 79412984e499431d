"""Configurations of the working folder: list, read and save them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from erniekit.config.parse import MAX_FILE_BYTES
from erniekit.errors import ConfigurationError
from erniekit.training.checkpoint.manifest import atomic_write_bytes
from erniekit.ui.workspace import CONFIGURATIONS, Workspace

MOST_FILES = 500


def configurations(workspace: Workspace) -> list[str]:
    """Return the names of the YAML files, without those that runs write into their folders."""
    found = []
    for path, files in workspace.walk():
        if path.name.startswith("checkpoint-"):
            continue
        kept = (name for name in files if name.endswith(CONFIGURATIONS) and not name.startswith("."))
        found += [workspace.name(path / name) for name in kept if name != "training_config.yaml"]
    return sorted(found, key=lambda name: (name.count("/"), name))[:MOST_FILES]


def read_configuration(workspace: Workspace, name: str) -> dict[str, Any]:
    """Return the text of a file, and its `version`, by which `save_configuration` sees that nobody else has changed it.

    Raises:
        UserError: there is no such file, it is no YAML file or no text, or lies elsewhere.
    """
    path = _path(workspace, name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError(f"{name}: is larger than 1 MB; is this a data file?")
        return {"path": workspace.name(path), "text": data.decode("utf-8-sig"), "version": _version(data)}
    except UnicodeDecodeError:
        raise ConfigurationError(f"{name}: is not UTF-8 text") from None
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be read: {error.strerror}") from None


def save_configuration(workspace: Workspace, name: str, text: str, version: str) -> dict[str, Any]:
    """Write a file; return what `read_configuration` does.

    Args:
        version: of the text that was changed; "" if the file is new.

    Raises:
        UserError: somebody else has changed the file, it is no YAML file, or lies elsewhere.
    """
    path = _path(workspace, name)
    now = _version(path.read_bytes()) if path.is_file() else ""
    if now != version:
        what = "was changed by another program" if version else "is there already"
        raise ConfigurationError(f"{name}: {what}; open it again, or save under another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, text.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name}: the text has half characters, which no file can hold") from None
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be written: {error.strerror}") from None
    return read_configuration(workspace, name)


def _path(workspace: Workspace, name: str) -> Path:
    path = workspace.inside(name)
    if path.suffix.lower() not in CONFIGURATIONS:
        raise ConfigurationError(f"{name}: the page opens and saves files that end in {' or '.join(CONFIGURATIONS)}")
    return path


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
