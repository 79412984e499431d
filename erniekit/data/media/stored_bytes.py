"""Fetch the bytes of recordings from the rows of Parquet and Arrow files.

Of Parquet files the row groups that were read last stay in memory. Arrow files, in which `datasets` keeps a data set in
its cache, are memory-mapped: their pages are the system's, which takes them back.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.errors import DataError

MAX_CACHED_BYTES = 1 << 28  # of row groups; the one that was read last always stays
MAPPED_COLUMNS = 64  # of Arrow files
_INSTALL = "pip install 'erniekit[data]'"


class _File(NamedTuple):
    """What tells the state of a file, so that a new one is read anew."""

    path: str
    size: int
    changed: int


_lock = Lock()  # of the next two
_footers: dict[_File, Any] = {}
_groups: OrderedDict[tuple[_File, str, int], Any] = OrderedDict()


def read_bytes(clip: Clip) -> bytes:
    """Return the bytes of the recording in a row.

    The column holds bytes, or as the `Audio` columns of `datasets` an object with the field `bytes`. Of a Parquet file
    only the row group of the clip is read, and only its column.

    Raises:
        RecordingError: the file, the row or the column is not there, or it holds no bytes.
        DataError: pyarrow is missing.
    """
    kind, value_of = ("Arrow", _arrow_value) if clip.path.endswith(".arrow") else ("Parquet", _parquet_value)
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise DataError(f"{clip.path}: to read {kind} files, install pyarrow ({_INSTALL})") from None
    try:
        status = os.stat(clip.path)
        value = value_of(clip, _File(clip.path, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        raise RecordingError(clip, f"the {kind} file of a recording", "no such file") from None
    except (OSError, ArrowException) as error:
        raise RecordingError(clip, f"a readable {kind} file", str(error).splitlines()[0]) from None
    if isinstance(value, dict):
        value = value.get("bytes")
    if not isinstance(value, bytes) or not value:
        raise RecordingError(clip, "the bytes of a recording", "none in this row")
    return value


def _no_row(clip: Clip, rows: int) -> RecordingError:
    return RecordingError(clip, f"a row of the {rows:,} in the file", f"row {clip.row + 1:,}")


def _no_column(clip: Clip) -> RecordingError:
    return RecordingError(clip, f"a column {clip.column!r}", "none in the file")


def _arrow_value(clip: Clip, file: _File) -> Any:
    try:
        column = _mapped_column(file, clip.column)
    except KeyError:
        raise _no_column(clip) from None
    if clip.row >= len(column):
        raise _no_row(clip, len(column))
    return column[clip.row].as_py()


@lru_cache(maxsize=MAPPED_COLUMNS)
def _mapped_column(file: _File, name: str) -> Any:
    from pyarrow import ipc, memory_map

    return ipc.open_stream(memory_map(file.path)).read_all().column(name)


def _parquet_value(clip: Clip, file: _File) -> Any:
    with _lock:
        footer = _footer(file)
        row = clip.row
        for number in range(footer.num_row_groups):
            rows = footer.row_group(number).num_rows
            if row < rows:
                return _group(clip, file, number)[row].as_py()
            row -= rows
        raise _no_row(clip, footer.num_rows)


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
        raise _no_column(clip)
    _groups[key] = table.column(0)
    while len(_groups) > 1 and sum(column.nbytes for column in _groups.values()) > MAX_CACHED_BYTES:
        _groups.popitem(last=False)
    return _groups[key]
