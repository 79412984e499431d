"""Read the weights of a neural codec from its folder, with weight norm folded."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite
from erniekit.model.storage.shards import format_problems, open_weight_files

# How files name the length and the direction of a weight with weight norm, after the name without "weight".
_NORM_NAMES = (("parametrizations.weight.original0", "parametrizations.weight.original1"), ("weight_g", "weight_v"))


class CodecWeights:
    """The weights of one folder, each read when it is taken, in float32.

    `digest` tells what has been taken so far: names, shapes and values.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ModelFileError if there are none, or one is damaged."""
        self.folder = folder
        self._files = open_weight_files(folder)
        self._taken: set[str] = set()
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def fingerprint(self, model_type: str, *facts: Any) -> str:
        """Return the digest of what has been taken so far, and of what else tells a model from others, as JSON."""
        return hashlib.sha256(json.dumps([model_type, *facts, self.digest]).encode()).hexdigest()

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a weight, with or without weight norm."""
        return name in self._files or self._norm_names(name) is not None

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Return a weight, float32. Where it has weight norm, this is length * direction / |direction|.

        Raises:
            ModelFileError: it is missing, has another shape, or values that are not finite.
        """
        stored = (name,) if name in self._files else self._norm_names(name)
        if stored is None:
            raise ModelFileError(f"{self.folder}: the weights lack {name}, which config.json asks for")
        values = [self._read(part) for part in stored]
        weight = values[0] if len(values) == 1 else self._fold(name, *values)
        if weight.shape != shape:
            raise ModelFileError(
                f"{self.folder}: {name} has shape {list(weight.shape)}; config.json asks for {list(shape)}"
            )
        self._hash.update(f"{name}{shape}".encode())
        self._hash.update(weight.data)
        return weight

    def refuse_others(self, unneeded: str) -> None:
        """Raise ModelFileError if there are weights that nobody took, unless their names match `unneeded` in full."""
        others = [name for name in self._files if name not in self._taken and not re.fullmatch(unneeded, name)]
        if others:
            raise ModelFileError(
                format_problems(f"{self.folder}: the weights do not fit config.json, which has no place for", others)
            )

    def _norm_names(self, name: str) -> tuple[str, str] | None:
        if name.endswith("weight"):
            before = name.removesuffix("weight")
            for length, direction in _NORM_NAMES:
                if before + length in self._files and before + direction in self._files:
                    return before + length, before + direction
        return None

    def _read(self, name: str) -> np.ndarray:
        file: SafetensorsFile = self._files[name]
        if not file.stored(name).is_float:
            raise ModelFileError(f"{file.path}: {name} has type {file.stored(name).dtype}; weights are floats")
        values = np.ascontiguousarray(file.read(name), np.float32)
        check_finite(values, name, file.path)
        self._taken.add(name)
        return values

    def _fold(self, name: str, length: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """Return the weight of weight norm (https://arxiv.org/abs/1602.07868): one length for each index it has."""
        axes = tuple(axis for axis, size in enumerate(length.shape) if size == 1)
        kept = [1 if axis in axes else size for axis, size in enumerate(direction.shape)]
        norm = (
            np.sqrt(np.square(direction, dtype=np.float64).sum(axes, keepdims=True)) if kept == [*length.shape] else 0
        )
        if not np.all(norm):
            raise ModelFileError(
                f"{self.folder}: {name}: lengths {list(length.shape)} and directions {list(direction.shape)} make no "
                "weight: they do not fit each other, or a direction is zero"
            )
        return (direction * (length / norm)).astype(np.float32)
