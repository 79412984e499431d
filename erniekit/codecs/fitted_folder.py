"""The folder of a fitted codec: its values in `config.json`, its arrays in `model.safetensors`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np

from erniekit.codecs.config_values import LARGEST
from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite, write_safetensors

CONFIG, ARRAYS = "config.json", "model.safetensors"
Values = TypeVar("Values")


def write_fitted(folder: Path, model_type: str, config: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the values of a dataclass and float32 arrays into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": model_type, **asdict(config)}
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / ARRAYS, {name: array.shape for name, array in arrays.items()}, arrays.items())


def read_config(folder: Path, model_type: str, kind: type[Values]) -> Values:
    """Read the values of a dataclass, which has a method `problem`, from `config.json`.

    Raises:
        ModelFileError: the file is missing or no JSON, is of another type of model, or a value is missing, unknown, of
            another type, or cannot be used.
    """
    path = folder / CONFIG
    values = read_json_object(path)
    found = values.pop("model_type", None)
    if found != model_type:
        raise ModelFileError(f"{path}: model_type is {found!r}: expected {model_type!r}")
    config = _values_of(kind, values, path, "")
    if problem := config.problem():  # type: ignore[attr-defined]
        raise ModelFileError(f"{path}: {problem}")
    return config


def read_arrays(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Read float32 arrays of the shapes that `config.json` says.

    Raises:
        ModelFileError: the file is missing or damaged, or an array is missing, has another shape or type, or is not
            finite.
    """
    file = SafetensorsFile(folder / ARRAYS)
    found = {}
    for name, shape in shapes.items():
        if name not in file.names():
            raise ModelFileError(f"{file.path}: there is no {name!r}, only {', '.join(sorted(file.names())[:5])}")
        stored = file.stored(name)
        if stored.shape != shape or stored.dtype != "F32":
            raise ModelFileError(
                f"{file.path}: {name} is {stored.dtype} {list(stored.shape)}: {folder / CONFIG} describes F32 "
                f"{list(shape)}.\n  The two files are not of one codec: copy both again from where they came from."
            )
        found[name] = file.read(name)
        check_finite(found[name], name, file.path)
    return found


def digest_of(facts: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Return a hex digest of what determines codes: values that JSON knows, and arrays."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name}{array.shape}{array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _values_of(kind: type[Values], values: Mapping[str, Any], path: Path, place: str) -> Values:
    known: dict[str, Any] = get_type_hints(kind)
    if odd := sorted(known.keys() ^ values.keys()):
        what = "is missing" if odd[0] in known else "is not known"
        raise ModelFileError(f"{path}: {place}{odd[0]} {what}: expected {', '.join(known)}")
    found: dict[str, Any] = {}
    for name, wanted in known.items():
        value = values[name]
        if isinstance(value, dict) and is_dataclass(wanted):
            found[name] = _values_of(known[name], value, path, f"{place}{name}.")
            continue
        if wanted is float and type(value) is int and abs(value) <= LARGEST:
            value = float(value)
        if type(value) is not wanted or (wanted in (int, float) and not abs(value) <= LARGEST):
            expected = "an object" if is_dataclass(wanted) else getattr(wanted, "__name__", str(wanted))
            raise ModelFileError(f"{path}: {place}{name} is {value!r:.80}: expected {expected}")
        found[name] = value
    return kind(**found)
