"""Recordings in the rows of Arrow files, as the cache of `datasets` holds them."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import clip_length, read_clip
from tests.data.media.sounds import noise

soundfile = pytest.importorskip("soundfile")
pyarrow = pytest.importorskip("pyarrow")
ROWS = 7


def write(path: Path, more: int = 0) -> str:
    def encoded(row: int) -> bytes:
        file = BytesIO()
        soundfile.write(file, noise(400 + row + more, seed=row), 16_000, format="FLAC")
        return file.getvalue()

    rows = [
        {"audio": {"bytes": encoded(row), "path": None}, "other": {"bytes": None, "path": "x"}} for row in range(ROWS)
    ]
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return str(path)


def test_each_row_gives_its_recording(tmp_path):
    path = write(tmp_path / "a.arrow")
    for row in (6, 0, 3):
        clip = Clip(path, row=row, column="audio")
        assert clip_length(clip) == 400 + row
        np.testing.assert_allclose(read_clip(clip), noise(400 + row, seed=row), atol=1e-4)
    write(tmp_path / "b.arrow", more=50)
    (tmp_path / "b.arrow").replace(path)  # a new file with the old one's name
    assert clip_length(Clip(path, row=3, column="audio")) == 453


def test_what_is_wrong_is_named(tmp_path):
    path = write(tmp_path / "a.arrow")
    broken = tmp_path / "broken.arrow"
    broken.write_bytes(b"no arrow at all, but some text")
    for clip, told in (
        (Clip(path, row=7, column="audio"), "expected a row of the 7 in the file, got row 8"),
        (Clip(path, row=1, column="sound"), "expected a column 'sound', got none"),
        (Clip(path, row=1, column="other"), f"{path}:2 (other): expected the bytes of a recording, got none"),
        (Clip(str(tmp_path / "gone.arrow"), row=0, column="audio"), "got no such file"),
        (Clip(str(broken), row=0, column="audio"), "expected a readable Arrow file"),
    ):
        with pytest.raises(RecordingError) as caught:
            clip_length(clip)
        assert told in str(caught.value)
