"""Recordings in the rows of Parquet and Arrow files: plain bytes, and the `Audio` columns of `datasets`."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import soundfile
from pyarrow import parquet

from erniekit.data.media import stored_bytes
from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import clip_length, read_clip
from erniekit.errors import DataError
from tests.data.media.sounds import noise

ROWS = 10


def encoded(row: int) -> bytes:
    file = BytesIO()
    soundfile.write(file, noise(400 + row, seed=row), 16_000, format="FLAC")
    return file.getvalue()


@pytest.fixture
def path(tmp_path):
    """Four row groups, of which the last is shorter."""
    rows = [
        {
            "audio": {"bytes": encoded(row), "path": f"{row}.flac"},
            "plain": encoded(row),
            "text": "x",
            "other": {"bytes": None, "path": f"{row}.flac"},
        }
        for row in range(ROWS)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=3)
    return str(tmp_path / "data.parquet")


@pytest.mark.parametrize("column", ["audio", "plain"])
def test_each_row_gives_its_recording(path, column):
    for row in (9, 0, 5, 2, 3):
        clip = Clip(path, row=row, column=column)
        assert clip_length(clip) == 400 + row
        np.testing.assert_allclose(read_clip(clip), noise(400 + row, seed=row), atol=1e-4)
    assert len(read_clip(Clip(path, 0.01, 0.02, row=4, column=column))) == 160


def test_only_the_row_group_and_column_of_the_clip_are_read(path, monkeypatch):
    read = []
    original = parquet.ParquetFile.read_row_group

    def recorded(self, number, columns):
        table = original(self, number, columns)
        read.append((number, table.column_names))
        return table

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", recorded)
    for row in (3, 4, 5, 3):
        read_clip(Clip(path, row=row, column="audio"))
    assert read == [(1, ["audio"])]
    monkeypatch.setattr(stored_bytes, "MAX_CACHED_BYTES", 1)
    for row in (0, 3, 0):
        read_clip(Clip(path, row=row, column="audio"))
    assert [number for number, _ in read] == [1, 0, 1, 0]


def test_threads_share_what_was_read(path):
    handles = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        lengths = list(pool.map(lambda row: len(read_clip(Clip(path, row=row % ROWS, column="audio"))), range(200)))
    assert lengths == [400 + row % ROWS for row in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= handles


def test_a_file_that_was_written_anew_is_read_anew(path):
    assert clip_length(Clip(path, row=0, column="plain")) == 400
    parquet.write_table(pyarrow.table({"plain": [encoded(77)]}), path)
    assert clip_length(Clip(path, row=0, column="plain")) == 477


@pytest.mark.parametrize(
    "row, column, told",
    [
        (10, "audio", r"data\.parquet:11 \(audio\): expected a row of the 10 in the file, got row 11"),
        (2, "sound", "expected a column 'sound', got none in the file"),
        (2, "text", r":3 \(text\): expected the bytes of a recording, got none in this row"),
        (2, "other", "expected the bytes of a recording"),
    ],
)
def test_what_is_not_there_is_named(path, row, column, told):
    with pytest.raises(RecordingError, match=told):
        read_clip(Clip(path, row=row, column=column))


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(RecordingError, match="no such file"):
        clip_length(Clip(str(tmp_path / "gone.parquet"), row=0, column="audio"))
    Path(tmp_path / "text.parquet").write_bytes(b"no table, only text")
    with pytest.raises(RecordingError, match="expected a readable Parquet file"):
        clip_length(Clip(str(tmp_path / "text.parquet"), row=0, column="audio"))


def write_arrow(path: Path, more: int = 0) -> str:
    rows = [{"audio": {"bytes": encoded(row + more)}, "other": {"bytes": None, "path": "x"}} for row in range(ROWS)]
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return str(path)


def test_each_row_of_an_arrow_file_gives_its_recording(tmp_path):
    path = write_arrow(tmp_path / "a.arrow")
    for row in (6, 0, 3):
        clip = Clip(path, row=row, column="audio")
        assert clip_length(clip) == 400 + row
        np.testing.assert_allclose(read_clip(clip), noise(400 + row, seed=row), atol=1e-4)
    write_arrow(tmp_path / "b.arrow", more=50)
    (tmp_path / "b.arrow").replace(path)  # a new file with the old one's name
    assert clip_length(Clip(path, row=3, column="audio")) == 453


def test_what_is_wrong_with_an_arrow_file_is_named(tmp_path):
    path = write_arrow(tmp_path / "a.arrow")
    broken = tmp_path / "broken.arrow"
    broken.write_bytes(b"no arrow at all, but some text")
    for clip, told in (
        (Clip(path, row=10, column="audio"), "expected a row of the 10 in the file, got row 11"),
        (Clip(path, row=1, column="sound"), "expected a column 'sound', got none"),
        (Clip(path, row=1, column="other"), f"{path}:2 (other): expected the bytes of a recording, got none"),
        (Clip(str(tmp_path / "gone.arrow"), row=0, column="audio"), "got no such file"),
        (Clip(str(broken), row=0, column="audio"), "expected a readable Arrow file"),
    ):
        with pytest.raises(RecordingError) as caught:
            clip_length(clip)
        assert told in str(caught.value)


@pytest.mark.parametrize("name, kind", [("a.arrow", "Arrow"), ("a.parquet", "Parquet")])
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, kind):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"{name}: to read {kind} files, install pyarrow \(pip install"):
        stored_bytes.read_bytes(Clip(str(tmp_path / name), row=0, column="audio"))
