"""Read the header of a safetensors file as strictly as the format's own library does.

Tensors fill the data of a file without overlap, gap or rest. A file that is damaged, or made to deceive, is refused
before a value is read, and the message names the tensor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.errors import ModelFileError

HEADER_LIMIT = 100_000_000  # the format's limit, bytes
FLOAT_TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3")  # weights of these types can be read
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_INTEGER_LIMIT = 2**64
_ABSENT: Any = None
_SHOWN = 200  # characters of a name or value in a message


class StoredTensor(NamedTuple):
    """Type and shape of a tensor in a file's header; `dtype` is the format's name for it, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def is_float(self) -> bool:
        """Whether the values can be weights."""
        return self.dtype in FLOAT_TYPES


class HeaderEntry(NamedTuple):
    """A tensor, and the bytes of the file's data that are its own."""

    tensor: StoredTensor
    start: int
    stop: int


class Header(NamedTuple):
    """What a header says: the tensors by name in the header's order, and the metadata."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]


def parse_header(path: Path, text: bytes, data_size: int) -> Header:
    """Parse and check a header.

    Args:
        path: of the file, for messages.
        text: the header's bytes.
        data_size: how many bytes follow it.

    Raises:
        ModelFileError: it is not a header, or does not fit the file.
    """
    try:
        stored = json.loads(
            text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_int=_natural_number
        )
    except ValueError as error:
        raise ModelFileError(f"{path}: not a safetensors file: {_shortened(str(error))}") from None
    except RecursionError:
        raise ModelFileError(f"{path}: not a safetensors file: brackets nested too deeply") from None
    if not isinstance(stored, dict):
        raise ModelFileError(f"{path}: not a safetensors file: the header is not a JSON object")
    metadata = stored.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(f"{path}: __metadata__ of the header: expected texts by name, got {_shown(metadata)}")
    entries = {name: _entry(path, name, value) for name, value in stored.items()}
    _check_ranges(path, entries, data_size)
    return Header(entries, metadata)


def _entry(path: Path, name: str, value: Any) -> HeaderEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key, _ABSENT) for key in ("dtype", "shape", "data_offsets"))
    problem = ""
    if not isinstance(dtype, str) or dtype not in _BITS:
        problem = f"dtype {_shown(dtype)} is not one of the format's"
    elif not isinstance(shape, list) or not all(type(size) is int for size in shape) or _is_too_large(shape):
        problem = f"shape {_shown(shape)}: expected a list of sizes"
    elif not isinstance(offsets, list) or len(offsets) != 2 or not all(type(end) is int for end in offsets):
        problem = f"data_offsets {_shown(offsets)}: expected the first byte and the one after the last"
    if problem:
        raise ModelFileError(f"{path}: {_shortened(name)}: the header entry cannot be read: {problem}")
    tensor, (start, stop) = StoredTensor(dtype, tuple(shape)), offsets
    if stop < start or 8 * (stop - start) != math.prod(shape) * _BITS[dtype]:
        raise ModelFileError(
            f"{path}: {_shortened(name)}: {dtype} {_shown(shape)} does not fill the bytes {start} to {stop} that the "
            "header gives it"
        )
    return HeaderEntry(tensor, start, stop)


def _is_too_large(shape: list[int]) -> bool:
    count = 1
    for size in shape:
        count *= size
        if count >= _INTEGER_LIMIT:
            return True
    return False


def _check_ranges(path: Path, entries: dict[str, HeaderEntry], data_size: int) -> None:
    end, before = 0, ""
    for name, (_, start, stop) in sorted(entries.items(), key=lambda item: item[1][1:]):
        if start != end:
            what = f"overlaps {_shortened(before)}" if start < end else f"leaves {start - end} bytes unused before it"
            raise ModelFileError(f"{path}: {_shortened(name)}: its byte range {start} to {stop} {what}")
        end, before = stop, name
    if end > data_size:
        raise ModelFileError(
            f"{path}: truncated? {_shortened(before)} ends at byte {end}, and {data_size} follow the header"
        )
    if end < data_size:
        raise ModelFileError(f"{path}: {data_size - end} bytes follow the last tensor; no tensor owns them")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Names that the format's library cannot hold, or that are there twice, are errors."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in values if names.count(name) > 1)!r} is there twice")
    for name, value in pairs:
        for text in (name, value):
            if isinstance(text, str):
                text.encode("utf-8")  # ValueError for half a surrogate pair
    return values


def _natural_number(digits: str) -> int | None:
    """Return a size or an offset; None if the format has no such number."""
    number = int(digits) if len(digits) <= 20 and not digits.startswith("-") else _INTEGER_LIMIT
    return number if number < _INTEGER_LIMIT else None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number of JSON")


def _shown(value: Any) -> str:
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
