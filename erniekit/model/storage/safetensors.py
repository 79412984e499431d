"""Read and write safetensors files tensor by tensor.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, a JSON header with every
tensor's type, shape and byte range, then the bytes. The library's NumPy interface reads no bfloat16 and needs all
tensors of a file at once to write it; here one tensor at a time is in memory, and equal tensors give equal files.
NumPy is imported where values are read or written: `erniekit validate` reads headers only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import ModelFileError
from erniekit.manifest import refuse_changed
from erniekit.model.storage.matrix_reading import StoredMatrix
from erniekit.model.storage.safetensors_header import HEADER_LIMIT, StoredTensor, parse_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike

_DTYPES = {  # as NumPy writes them
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # the upper half of a float32; widened on reading
    "F8_E4M3": "|u1",  # its code; widened on reading
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if name not in ("BF16", "F8_E4M3")}
_LFS_POINTER = b"version https://git-lfs"
_BLOCK = 1 << 20  # bytes of a tensor that are in memory at once if it can be read in blocks


class SafetensorsFile:
    """One file: names and shapes at once, values on demand.

    Values are read, not mapped: touched pages of a mapping would count as memory of the process. Where the folder has a
    manifest, the size is compared at once, and the content before the first value is read.
    """

    def __init__(self, path: Path | str, shards: Iterable[str] = ()) -> None:
        """Read the header. Raises ModelFileError if the file is missing, truncated or not safetensors.

        Args:
            shards: the files of which this is one, to be compared with the manifest together, in several threads.
        """
        self.path = Path(path)
        if not self.path.is_file():
            raise ModelFileError(f"{self.path}: no such file")
        refuse_changed(self.path.parent, [self.path.name], hashes=False)
        self._to_compare = [self.path.name, *shards]
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ModelFileError(_not_safetensors(self.path, size))
            self._data_start = 8 + length
            self._entries, self.metadata = parse_header(self.path, file.read(length), size - self._data_start)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].tensor.shape

    def stored(self, name: str) -> StoredTensor:
        return self._entries[name].tensor

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield one tensor's bytes as stored, whatever its type, a few MB at a time."""
        self._compare()
        start, stop = (self._data_start + offset for offset in self._entries[name][1:])
        with self.path.open("rb") as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK, stop - start))
                if not block:
                    raise ModelFileError(f"{self.path}: {name}: the file ends early; it was cut while being read")
                start += len(block)
                yield block

    def read(self, name: str) -> np.ndarray:
        """Return one tensor's values; bfloat16 and e4m3 as float32 (exact), everything else in its own type.

        Raises:
            ModelFileError: the tensor has a type that NumPy lacks, such as another 8-bit float.
        """
        shape = self.shape(name)
        return self._values(name, 0, math.prod(shape)).reshape(shape)

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return the location of a tensor's values, as a matrix of its rows; None: it has no values, or no rows."""
        tensor, first, _ = self._entries[name]
        if not tensor.nbytes or not tensor.shape:
            return None
        self._compare()
        rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
        return StoredMatrix(self.path, tensor.dtype, self._data_start + first, rows, columns, columns)

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield one tensor's rows like `read`, a few MB at a time, with their row numbers.

        Args:
            wanted: consecutive rows; None: all. Others are not read.
        """
        stored = self.stored(name)
        count = stored.shape[0]
        step = max(1, _BLOCK // max(1, stored.nbytes // max(1, count)))
        rows = range(count) if wanted is None else wanted
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            yield slice(start, stop), self.rows(name, start, stop)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return some rows of one tensor like `read`."""
        inner = self.shape(name)[1:]
        width = math.prod(inner)
        return self._values(name, start * width, stop * width).reshape(stop - start, *inner)

    def _compare(self) -> None:
        """Raise ModelFileError if the folder has a manifest, and the file or another shard has changed since."""
        if self._to_compare:
            refuse_changed(self.path.parent, self._to_compare)
            self._to_compare = []

    def _values(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the tensor's values from index `start` to `stop`, flat."""
        import numpy as np

        self._compare()
        (stored, _), first, _ = self._entries[name]
        if stored not in _DTYPES:
            raise ModelFileError(f"{self.path}: {name}: values of type {stored} are not supported")
        dtype = np.dtype(_DTYPES[stored])
        offset = self._data_start + first + start * dtype.itemsize
        values = np.fromfile(self.path, dtype, stop - start, offset=offset)
        if values.size < stop - start:
            raise ModelFileError(f"{self.path}: {name}: the file ends early; it was cut while being read")
        if stored == "F8_E4M3":
            return float8_values()[values]
        if stored != "BF16":
            return values
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)


@cache
def float8_values() -> np.ndarray:
    """Return the value of every byte in e4m3, float32 [256]; a byte with all bits but the sign set is NaN."""
    import numpy as np

    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def _not_safetensors(path: Path, size: int) -> str:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return (
                f"{path} is a git-lfs pointer ({size} bytes), not the file itself.\n"
                f"  Run `git lfs install && git lfs pull` in {path.parent}, or download the file."
            )
    return f"{path}: not a safetensors file, or truncated ({size} bytes)"


def check_finite(values: np.ndarray, name: str, path: Path) -> None:
    """Raise ModelFileError if weights, or a part of them, hold NaN or an infinity; costs a fifth of reading them.

    Args:
        name: of the weight.
        path: of its file.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        if math.isfinite(values.sum(dtype=np.promote_types(values.dtype, np.float32))):
            return
    if (count := int(values.size - np.isfinite(values).sum())) > 0:
        raise ModelFileError(
            f"{path}: {name}: {count:,} of {values.size:,} values read are NaN or infinite, so the model cannot "
            "compute.\n  Its training has diverged, or the file is damaged; use an earlier checkpoint or another copy."
        )


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: Mapping[str, str] | None = None,
    dtype: DTypeLike = "float32",
) -> None:
    """Write tensors of one dtype, one at a time, in the order of `shapes`; `tensors` must yield the same order.

    Arrays of any memory layout are stored in C order. The file is not synced to disk.
    """
    import numpy as np

    stored = np.dtype(dtype).newbyteorder("<")

    def contents() -> Iterator[tuple[str, Iterable[Any]]]:
        for (expected, shape), (name, values) in zip(shapes.items(), tensors, strict=True):
            assert name == expected and values.shape == shape, (name, expected, values.shape, shape)
            yield name, [np.ascontiguousarray(values, stored).data]

    write_stored(
        path, {name: StoredTensor(_NAMES[stored.str], shape) for name, shape in shapes.items()}, contents(), metadata
    )


def write_stored(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    contents: Iterable[tuple[str, Iterable[Any]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors of any types from their bytes, in the order of `tensors`.

    Args:
        contents: yields in the same order each tensor's name and its bytes, in blocks that add up to its size.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, (name, blocks) in zip(tensors, contents, strict=True):
            assert name == expected, (name, expected)
            written = sum(file.write(block) for block in blocks)
            assert written == tensors[name].nbytes, (name, written, tensors[name])
