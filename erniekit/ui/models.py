"""Model folders of the working folder, with which the page can talk."""

from __future__ import annotations

import re
from typing import Any

from erniekit.build.checks import answering_folders
from erniekit.errors import ConfigurationError, UserError
from erniekit.hub.cache import ADAPTER_CONFIG, MODEL_CONFIG
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.ui.workspace import Workspace

_WEIGHTS = re.compile(r".+\.safetensors(\.index\.json)?")


def model_folders(workspace: Workspace) -> list[dict[str, Any]]:
    """Return the folders that hold weights or adapters, the ones that were written last first."""
    found = []
    for path, files in workspace.walk():
        described = MODEL_CONFIG in files or ADAPTER_CONFIG in files
        if described and any(_WEIGHTS.fullmatch(name) for name in files):
            name = ADAPTER_CONFIG if ADAPTER_CONFIG in files else MODEL_CONFIG
            found.append({"folder": workspace.name(path), "at": (path / name).stat().st_mtime})
    return sorted(found, key=lambda model: -model["at"])


def abilities(workspace: Workspace, folder: str) -> dict[str, bool]:
    """Return whether a model answers in text (`chats`), takes recordings (`hears`) and makes sound (`speaks`).

    Raises:
        UserError: it is no model folder, or lies elsewhere.
    """
    path = workspace.inside(folder)
    base, _ = answering_folders(path, None)
    if not workspace.readable(str(base)):
        raise ConfigurationError(f"{folder}: its base model {base} lies outside of {workspace.root}")
    try:
        config = ModelConfig.from_folder(base)
    except UserError:  # the server that is started says why
        return {"chats": True, "hears": False, "speaks": False}
    speaks = config.architecture.codes is not None
    return {"chats": not speaks, "hears": not speaks and bool(config.architecture.towers), "speaks": speaks}
