"""Weights stored as 8-bit floats, in the format of compressed-tensors (vLLM and transformers read it). NumPy only.

    <path>.weight        F8_E4M3 [out, in]
    <path>.weight_scale  F32 [1]
    <path>.input_scale   F32 [1]            of the layer's activations, measured in training

If training used the Hadamard rotation, codes and scales are those of rotated weights and activations, and the method
has our own name, because other programs would not rotate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.quantization.hadamard import hadamard
from erniekit.model.storage.packed_tensors import METHOD, OWN_METHOD, layer_patterns
from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor

TYPE = "F8_E4M3"
SCALE, INPUT_SCALE = "weight_scale", "input_scale"  # replace `weight` at the end of a name
BLOCK_KEY = "hadamard_block_size"


def stored_tensors(name: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
    """Return the tensors that a file stores for a weight."""
    path = name.removesuffix("weight")
    return {
        name: StoredTensor(TYPE, shape),
        path + SCALE: StoredTensor("F32", (1,)),
        path + INPUT_SCALE: StoredTensor("F32", (1,)),
    }


def quantization_config(names: list[str], hadamard_block: int) -> dict[str, Any]:
    """Return the entry of config.json for weights of these names.

    Args:
        hadamard_block: 0 without rotation.
    """
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    rotation = {BLOCK_KEY: hadamard_block} if hadamard_block else {}
    return {
        "quant_method": OWN_METHOD if hadamard_block else METHOD,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            "group_0": {"targets": layer_patterns(names), "weights": scheme, "input_activations": scheme}
        },
        **rotation,
    }


class Float8Tensor:
    """Presents an 8-bit weight as a file of float32 values, with the methods of `SafetensorsFile` that loading uses."""

    def __init__(self, name: str, files: Mapping[str, SafetensorsFile], block: int) -> None:
        """Open the weight. Raises ModelFileError if its scale is missing."""
        self._file, self._block = files[name], block
        self.path, self.metadata = self._file.path, self._file.metadata
        scale = name.removesuffix("weight") + SCALE
        if scale not in files or np.prod(files[scale].shape(scale)) != 1:
            raise ModelFileError(f"{self.path}: {name} is stored in 8 bits, but {scale}, a single value, is missing")
        self._scale = files[scale].read(scale).astype(np.float32).reshape(())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor("F32", self._file.shape(name))

    def read(self, name: str) -> np.ndarray:
        return self.rows(name, 0, self._file.shape(name)[0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._values(self._file.rows(name, start, stop))

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        for rows, codes in self._file.row_blocks(name, wanted):
            yield rows, self._values(codes)

    def _values(self, codes: np.ndarray) -> np.ndarray:
        scaled = codes * self._scale
        return (scaled.reshape(-1, self._block) @ hadamard(self._block)).reshape(codes.shape) if self._block else scaled


def with_float8_weights(files: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the same files with 8-bit weights read as float32, and without their scales.

    Args:
        config: the model's `quantization_config`, if it has one.
    """
    stored = [name for name, file in files.items() if name.endswith("_proj.weight") and file.stored(name).dtype == TYPE]
    if not stored:
        return dict(files)
    block = int((config or {}).get(BLOCK_KEY, 0))
    paths = [name.removesuffix("weight") for name in stored]
    scales = {path + suffix for path in paths for suffix in (SCALE, INPUT_SCALE)}
    plain = {name: file for name, file in files.items() if name not in scales}
    return plain | {name: Float8Tensor(name, files, block) for name in stored}
