"""Fetch the bytes of a recording from a Parquet file, with the row groups that were read last in memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.errors import DataError

MAX_CACHED_BYTES = 1 << 28  # of row groups; the one that was read last always stays
_INSTALL = "pip install 'erniekit[data]'"


class _File(NamedTuple):
    """What tells the state of a file, so that a new one is read anew."""

    path: str
    size: int
    changed: int


_lock = Lock()
_footers: dict[_File, Any] = {}
_groups: OrderedDict[tuple[_File, str, int], Any] = OrderedDict()


def read_bytes(clip: Clip) -> bytes:
    """Return the bytes of the recording in a row. Only its row group is read, and only the clip's column.

    The column holds bytes, or as the `Audio` columns of `datasets` an object with the field `bytes`.

    Raises:
        RecordingError: the file, the row or the column is not there, or it holds no bytes.
        DataError: pyarrow is missing.
    """
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise DataError(f"{clip.path}: to read Parquet files, install pyarrow ({_INSTALL})") from None
    try:
        with _lock:
            value = _value(clip)
    except FileNotFoundError:
        raise RecordingError(clip, "a Parquet file", "no such file") from None
    except (OSError, ArrowException) as error:
        raise RecordingError(clip, "a readable Parquet file", str(error).splitlines()[0]) from None
    if isinstance(value, dict):
        value = value.get("bytes")
    if not isinstance(value, bytes) or not value:
        raise RecordingError(clip, "the bytes of a recording", "none in this row")
    return value


def forget() -> None:
    """Free the memory of the row groups."""
    with _lock:
        _groups.clear()
        _footers.clear()


def _value(clip: Clip) -> Any:
    status = os.stat(clip.path)
    file = _File(clip.path, status.st_size, status.st_mtime_ns)
    footer = _footer(file)
    row = clip.row
    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        if row < rows:
            return _group(clip, file, number)[row].as_py()
        row -= rows
    raise RecordingError(clip, f"a row of the {footer.num_rows:,} in the file", f"row {clip.row + 1:,}")


def _footer(file: _File) -> Any:
    from pyarrow.parquet import read_metadata

    if file not in _footers:
        for old in [each for each in _footers if each.path == file.path]:
            del _footers[old]
        _footers[file] = read_metadata(file.path)
    return _footers[file]


def _group(clip: Clip, file: _File, number: int) -> Any:
    """Return the column of a row group, of objects only their bytes."""
    from pyarrow.parquet import ParquetFile

    key = (file, clip.column, number)
    if key in _groups:
        _groups.move_to_end(key)
        return _groups[key]
    with ParquetFile(file.path, metadata=_footers[file], memory_map=False) as opened:
        leaves = [f"{clip.column}.bytes", clip.column]
        table = next((found for leaf in leaves if (found := opened.read_row_group(number, [leaf])).num_columns), None)
    if table is None:
        raise RecordingError(clip, f"a column {clip.column!r}", "none in the file")
    _groups[key] = table.column(0)
    while len(_groups) > 1 and sum(column.nbytes for column in _groups.values()) > MAX_CACHED_BYTES:
        _groups.popitem(last=False)
    return _groups[key]
