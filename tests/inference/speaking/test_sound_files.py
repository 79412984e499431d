"""Sound goes into files that are complete, or into a stream that is heard while it grows."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile

from erniekit.errors import DataError
from erniekit.inference.speaking import Piece
from erniekit.inference.speaking.sound_files import PieceFiles, SoundFiles, SoundStream, file_targets, write_sound

RATE = 8000
CODES = np.zeros((1, 1), np.int64)


def piece(utterance: int, number: int, *, last: bool, value: float) -> Piece:
    return Piece(utterance, number, last, CODES, np.full(100, value, np.float32), 0.0)


PIECES = [
    piece(0, 0, last=False, value=0.1),
    piece(1, 0, last=True, value=0.2),
    piece(0, 1, last=True, value=0.3),
    piece(2, 0, last=True, value=0.4),
]


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_a_file_holds_all_pieces_of_its_text(tmp_path: Path, form: str) -> None:
    targets = file_targets(tmp_path / "out", ["a", "b", "c"], form)
    files = SoundFiles(targets, RATE, form)
    assert [files.add(each) for each in PIECES] == [None, targets[1], targets[0], targets[2]]
    sound, rate = soundfile.read(targets[0])
    assert rate == RATE
    np.testing.assert_allclose(sound, np.repeat([0.1, 0.3], 100), atol=1e-4)


def test_pieces_may_have_files_of_their_own(tmp_path: Path) -> None:
    files = PieceFiles(file_targets(tmp_path / "x.wav", ["a"], "wav", pieces=True), RATE, "wav")
    assert [files.add(each) for each in (PIECES[0], PIECES[2])] == [tmp_path / "x-01.wav", tmp_path / "x-02.wav"]
    assert len(soundfile.read(tmp_path / "x-02.wav")[0]) == 100
    (tmp_path / "x-01.wav").unlink()
    with pytest.raises(DataError, match=r"x-02.wav is there already"):
        file_targets(tmp_path / "x.wav", ["a"], "wav", pieces=True)
    write_sound(tmp_path / "x-01.wav", np.zeros(1, np.float32), RATE)
    with pytest.raises(DataError, match=r"x-01.wav is there already"):
        file_targets(tmp_path / "x.wav", ["a"], "wav", pieces=True)


def test_a_stream_keeps_the_order_of_texts_and_does_not_wait() -> None:
    stream = BytesIO()
    target, lengths = SoundStream(stream, RATE, "wav"), [44]
    for each in PIECES:
        target.add(each)
        lengths.append(len(stream.getvalue()))
    assert lengths == [44, 244, 244, 644, 844]
    assert stream.getvalue()[:4] == b"RIFF"
    samples = np.frombuffer(stream.getvalue()[44:], "<i2") / 32767
    np.testing.assert_allclose(samples, np.repeat([0.1, 0.3, 0.2, 0.4], 100), atol=1e-4)
    sound, rate = soundfile.read(BytesIO(stream.getvalue()))
    assert rate == RATE and len(sound) == 400


def test_a_raw_stream_has_no_header() -> None:
    stream = BytesIO()
    SoundStream(stream, RATE, "raw").add(PIECES[0])
    assert len(stream.getvalue()) == 200
    with pytest.raises(DataError, match="a stream is wav or raw"):
        SoundStream(stream, RATE, "flac")


def test_full_scale_does_not_wrap(tmp_path: Path) -> None:
    write_sound(tmp_path / "loud.wav", np.array([1.0, -1.0, 1.5, -1.5], np.float32), RATE)
    sound, _ = soundfile.read(tmp_path / "loud.wav")
    np.testing.assert_allclose(sound, [1, -1, 1, -1], atol=1e-4)
    write_sound(tmp_path / "loud.raw", np.array([1.0], np.float32), RATE, "raw")
    assert (tmp_path / "loud.raw").read_bytes() == b"\xff\x7f"


def test_targets_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "there.wav").write_text("")
    for output, names, told in (
        ("x.wav", ["a", "b"], "is one file, and there are 2 texts"),
        ("x.flac", ["a"], "write --format flac"),
        ("file", ["a"], "is not a folder"),
        ("there.wav", ["a"], "there already"),
        (".", ["there"], "there already"),
        (".", ["0002", "a", "0002"], "0002.wav would be the file of text 1 and of text 3"),
    ):
        with pytest.raises(DataError, match=told):
            file_targets(tmp_path / output, names, "wav")
    for form in ("wav", "raw"):
        with pytest.raises(DataError, match=r"file/a\.\w+ cannot be written: "):
            write_sound(tmp_path / "file" / f"a.{form}", np.zeros(1, np.float32), RATE, form)
