"""What proofs look at: the tensors that a run has left, and the arguments with which a function was called."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.model.storage.safetensors import SafetensorsFile


def tensors(folder: Path, pattern: str = "*model*.safetensors") -> dict[str, np.ndarray]:
    """The tensors of one file of a folder: its weights, its adapters, or `optimizer.safetensors`."""
    (path,) = folder.glob(pattern)
    file = SafetensorsFile(path)
    return {name: np.array(file.read(name)) for name in file.names()}


def recorded(function: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values of one argument in every call of a function from now on."""
    original = pkgutil.resolve_name(function)
    signature, seen = inspect.signature(original), []

    def recording(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        seen.append(bound.arguments[argument])
        return original(*arguments, **named)

    monkeypatch.setattr(function, recording)
    return seen


def samples_of_an_epoch(said: str) -> int:
    """The number in "epoch 0: 60 samples, ..."."""
    line = next(line for line in said.splitlines() if line.startswith("epoch 0:"))
    return int(line.split()[2].replace(",", ""))
