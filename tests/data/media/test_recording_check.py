"""Recordings that can be read, but are silent, overloaded, broken off or of another duration than declared."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import soundfile
from pyarrow import parquet

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording_check import recording_problems
from tests.data.media.sounds import RATE, noise, tone, write


def speech_like(seconds: float = 1.0) -> np.ndarray:
    """Three syllables with pauses between them."""
    loudness = np.clip(np.sin(6 * np.pi * np.arange(round(seconds * RATE)) / (seconds * RATE)), 0, None)
    return tone(seconds) * loudness.astype(np.float32)


def told(clip: Clip) -> list[str]:
    return [f"{found.expected}; {found.got}" for found in recording_problems(clip)]


@pytest.mark.parametrize(
    "sound",
    [speech_like(), tone(1.0), noise(RATE), tone(1.0) / 0.5, tone(0.02), speech_like() * np.float32(0.001)],
    ids=["speech", "tone", "noise", "full scale", "short", "quiet"],
)
def test_nothing_is_said_of_a_usable_recording(tmp_path, sound):
    assert told(Clip(write(tmp_path / "s.wav", sound, subtype="FLOAT"))) == []
    assert told(Clip(write(tmp_path / "s.ogg", sound * np.float32(0.9)))) == []


def test_silence(tmp_path):
    (found,) = told(Clip(write(tmp_path / "s.wav", np.zeros(RATE, np.float32))))
    assert found == "sound; silence (every sample is 0)"
    (found,) = told(Clip(write(tmp_path / "s.wav", tone(1.0) * np.float32(1e-4), subtype="FLOAT")))
    assert found == "sound; silence (peak -86 dB)"
    sound = np.concatenate([np.zeros(RATE, np.float32), speech_like()])
    path = write(tmp_path / "s.wav", sound)
    assert told(Clip(path)) == [] and len(told(Clip(path, 0.1, 0.9))) == 1


def test_overload_of_one_channel(tmp_path):
    loud = np.clip(speech_like() * 8, -1, 1)
    path = write(tmp_path / "s.wav", np.stack([speech_like(), loud], axis=1))
    (found,) = told(Clip(path))
    assert "at most 1% of the samples at full scale; " in found and "overloaded" in found


def test_a_segment_that_ends_in_a_sound(tmp_path):
    path = write(tmp_path / "s.wav", speech_like())
    (found,) = told(Clip(path, 0.0, 0.76))  # in the middle of the third syllable
    assert found.startswith("a quiet end; ")
    assert told(Clip(path, 0.0, 0.66)) == []  # before it


def test_ogg_that_is_cut_off(tmp_path):
    path = Path(write(tmp_path / "s.ogg", noise(5 * RATE)))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    assert "a last page of the Ogg file; none: the file is cut off" in told(Clip(str(path)))


def test_late_sections_of_mp3(tmp_path, monkeypatch):
    monkeypatch.setattr("erniekit.data.media.recording_check.MAX_SKIPPED", 1)
    for name, count in (("s.mp3", 1), ("s.flac", 0)):
        path = write(tmp_path / name, np.concatenate([speech_like()] * 3))
        assert len(told(Clip(path, 1.5, 2.6))) == count and told(Clip(path, 0.5, 1.6)) == []


def test_the_duration_that_a_record_declares(tmp_path):
    clip = Clip(write(tmp_path / "s.wav", speech_like()))
    for declared in (None, 1.0, 0.95, 1.09):
        assert told(replace(clip, duration=declared)) == []
    assert told(replace(clip, duration=2.0)) == ["2 s, as the record says; 1.000 s"]


def test_recordings_in_parquet_files(tmp_path):
    file = BytesIO()
    soundfile.write(file, np.zeros(800), RATE, format="OGG")
    parquet.write_table(pyarrow.table({"audio": [file.getvalue(), file.getvalue()[:-100]]}), tmp_path / "s.parquet")
    clips = [Clip(str(tmp_path / "s.parquet"), row=row, column="audio") for row in range(2)]
    assert "silence" in told(clips[0])[0]
    with pytest.raises(RecordingError):
        recording_problems(clips[1])


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(RecordingError, match="no such file"):
        recording_problems(Clip(str(tmp_path / "gone.wav")))
