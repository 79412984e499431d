"""Weights stored as 8- or 4-bit codes, in the format of compressed-tensors (vLLM and transformers read it). NumPy only.

Three tensors replace `<path>.weight` [out, in]:

    <path>.weight_packed  I32 [out, in * bits / 32]  consecutive codes from the lowest bits on, never negative
    <path>.weight_scale   F32 [out, in / group]
    <path>.weight_shape   I64 [2]                    out, in

`quantization_config` in config.json defines their meaning. nf4, which compressed-tensors lacks, has the same tensors
under a method name of our own, so that no other program reads its codes as integers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.quantization.codes import QuantizedTensor, dequantize
from erniekit.model.quantization.formats import INT4, INT8, NF4, Format
from erniekit.model.storage.model_folder import CONFIG_KEY as CONFIG_KEY
from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor

PACKED, SCALE, SHAPE = SUFFIXES = ("_packed", "_scale", "_shape")  # appended to the name of the weight
METHOD, OWN_METHOD = "compressed-tensors", "erniekit"


def stored_tensors(name: str, shape: tuple[int, int], form: Format) -> dict[str, StoredTensor]:
    """Return the tensors that a file stores for a weight.

    Raises:
        ModelFileError: the codes of an output do not fill complete 32-bit words.
    """
    outputs, inputs = shape
    if inputs * form.bits % 32:
        raise ModelFileError(
            f"{name}: {inputs} inputs in {form.name} do not fill 32-bit words, which the file format needs"
        )
    scales = form.shapes(outputs, inputs)[1]
    return {
        name + PACKED: StoredTensor("I32", (outputs, inputs * form.bits // 32)),
        name + SCALE: StoredTensor("F32", scales),
        name + SHAPE: StoredTensor("I64", (2,)),
    }


def stored_values(packed: QuantizedTensor, shape: tuple[int, int], form: Format) -> list[np.ndarray]:
    """Return the values of those tensors."""
    codes = packed.codes if form.levels else (packed.codes.astype(np.int16) + 128).astype(np.uint8)
    return [np.ascontiguousarray(codes), packed.scales.astype("<f4"), np.array(shape, "<i8")]


def quantization_config(weights: Mapping[str, tuple[tuple[int, int], Format]]) -> dict[str, Any]:
    """Return the entry of config.json for weights of these names, shapes and formats.

    Layers that differ only in numbers share an entry, so that a model of any depth has only a few.
    """
    groups: dict[tuple[Format, int], list[str]] = {}
    for name, ((_, inputs), form) in weights.items():
        groups.setdefault((form, form.group(inputs) if form.levels else 0), []).append(name)
    own = any(form is NF4 for form, _ in groups)
    return {
        "quant_method": OWN_METHOD if own else METHOD,
        "format": "nf4" if own else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{number}": {"targets": layer_patterns(names), "weights": _scheme(form, group)}
            for number, ((form, group), names) in enumerate(groups.items())
        },
    }


def layer_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns of compressed-tensors that match the linear layers of these weights."""
    paths = (re.escape(name.removesuffix(".weight")) for name in names)
    return list(dict.fromkeys("re:" + re.sub(r"\d+", r"\\d+", path) for path in paths))


def _scheme(form: Format, group: int) -> dict[str, Any]:
    by_group = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": form.bits, "type": "int" if form is not NF4 else "nf4", "symmetric": True, **by_group}


class PackedTensor:
    """Presents a quantized weight as a file of float32 values, with the methods of
    `SafetensorsFile` that loading uses."""

    def __init__(self, name: str, parts: Mapping[str, SafetensorsFile], *, normal_float: bool) -> None:
        """Open the weight. Raises ModelFileError if its tensors are missing or do not fit each other."""
        self.name, self._parts = name, parts
        missing = [name + suffix for suffix in SUFFIXES if name + suffix not in parts]
        file = parts[name + PACKED]
        self.path, self.metadata = file.path, file.metadata
        if missing:
            raise ModelFileError(f"{file.path}: {name + PACKED} lacks {' and '.join(missing)}")
        types = {suffix: parts[name + suffix].stored(name + suffix) for suffix in SUFFIXES}
        stored, scales = types[PACKED], types[SCALE].shape
        plain = types[SHAPE].dtype in ("I64", "I32") and types[SHAPE].shape == (2,) and types[SCALE].is_float
        self._shape = tuple(int(size) for size in parts[name + SHAPE].read(name + SHAPE)) if plain else ()
        bits = (
            32 * stored.shape[1] // self._shape[1] if len(stored.shape) == 2 and min(self._shape, default=0) > 0 else 0
        )
        fits = (
            bits > 0
            and stored.dtype == "I32"
            and stored.shape[0] == self._shape[0]
            and bits * self._shape[-1] == 32 * stored.shape[1]
        )
        fits = (
            fits
            and len(scales) == 2
            and scales[0] == self._shape[0]
            and scales[1] > 0
            and self._shape[1] % scales[1] == 0
        )
        if bits not in (4, 8) or not fits:
            raise ModelFileError(
                f"{file.path}: {name}: {stored.dtype} {list(stored.shape)} with scales {list(scales)} is not a weight "
                f"{list(self._shape)} of 4 or 8 bits"
            )
        self._form = INT8 if bits == 8 else NF4 if normal_float else INT4

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor("F32", self._shape)

    def read(self, name: str) -> np.ndarray:
        return self.rows(name, 0, self._shape[0])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        words = self._parts[self.name + PACKED].rows(self.name + PACKED, start, stop)
        scales = self._parts[self.name + SCALE].rows(self.name + SCALE, start, stop).astype(np.float32)
        codes = words.view(np.uint8)
        if not self._form.levels:
            codes = (codes.astype(np.int16) - 128).astype(np.int8)
        return dequantize(QuantizedTensor(codes, scales), self._form)

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        packed = self.name + PACKED
        for rows, _ in self._parts[packed].row_blocks(packed, wanted):
            yield rows, self.rows(name, rows.start, rows.stop)


def with_packed_weights(
    files: Mapping[str, SafetensorsFile], config: Mapping[str, Any] | None
) -> dict[str, SafetensorsFile | PackedTensor]:
    """Return the same files, with quantized weights under the names of the weights.

    Args:
        config: the model's `quantization_config`, if it has one.

    Raises:
        ModelFileError: some of their tensors are missing or do not fit.
    """
    packed = {name.removesuffix(PACKED) for name in files if name.endswith(f".weight{PACKED}")}
    if not packed:
        return dict(files)
    nf4 = (config or {}).get("format") == "nf4"
    parts = {name + suffix for name in packed for suffix in SUFFIXES}
    plain: dict[str, SafetensorsFile | PackedTensor] = {name: file for name, file in files.items() if name not in parts}
    return plain | {name: PackedTensor(name, files, normal_float=nf4) for name in packed}
