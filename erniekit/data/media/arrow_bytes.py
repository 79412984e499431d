"""Fetch the bytes of a recording from an Arrow file, which is how `datasets` keeps a data set in its cache."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError

MAPPED_COLUMNS = 64  # of files; their pages are the system's, which takes them back


def read_bytes(clip: Clip) -> bytes:
    """Return the bytes of the recording in a row of the memory-mapped file.

    Raises:
        RecordingError: the file, the row or the column is not there, or it holds no bytes.
    """
    from pyarrow import ArrowException

    try:
        status = os.stat(clip.path)
        column = _column(clip.path, clip.column, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        raise RecordingError(clip, "an Arrow file", "no such file") from None
    except KeyError:
        raise RecordingError(clip, f"a column {clip.column!r}", "none in the file") from None
    except (OSError, ArrowException) as error:
        raise RecordingError(clip, "a readable Arrow file", str(error).splitlines()[0]) from None
    if clip.row >= len(column):
        raise RecordingError(clip, f"a row of the {len(column):,} in the file", f"row {clip.row + 1:,}")
    value = column[clip.row].as_py()
    data = value.get("bytes") if isinstance(value, dict) else None
    if not data:
        raise RecordingError(clip, "the bytes of a recording", "none in this row")
    return bytes(data)


@lru_cache(maxsize=MAPPED_COLUMNS)
def _column(path: str, name: str, size: int, changed: int) -> Any:
    """Map a column; a file of another size or time of change is another one."""
    from pyarrow import ipc, memory_map

    del size, changed
    return ipc.open_stream(memory_map(path)).read_all().column(name)
