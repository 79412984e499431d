"""Long recordings: cut at pauses, with nothing lost and nothing twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.media.errors import RecordingError
from erniekit.inference import chunks
from erniekit.inference.chunks import chunk_borders, read_chunks

RATE = 1600


def words(*seconds: tuple[float, float], total: float, rate: int = RATE) -> np.ndarray:
    """Noise from each first to each second number of seconds, over a faint one."""
    draw = np.random.default_rng(5)
    sound = draw.normal(0, 0.001, round(total * rate))
    for start, stop in seconds:
        sound[round(start * rate) : round(stop * rate)] = draw.normal(0, 0.2, round(stop * rate) - round(start * rate))
    return sound.astype(np.float32)


def test_a_cut_is_in_a_pause() -> None:
    spoken = [(0.0, 8.7), (9.3, 17.0), (17.4, 24.0)]
    borders = chunk_borders(words(*spoken, total=24.0), 10 * RATE, RATE)
    assert len(borders) == 4 and borders[0] == 0 and borders[-1] == 24 * RATE
    assert [8.7 < borders[1] / RATE < 9.3, 17.0 < borders[2] / RATE < 17.4] == [True, True]


def test_without_a_pause_it_is_cut_all_the_same() -> None:
    borders = chunk_borders(words((0, 25), total=25.0), 10 * RATE, RATE)
    lengths = np.diff(borders) / RATE
    assert lengths.max() <= 10 and lengths.min() >= 1 and lengths.sum() == pytest.approx(25)


def test_what_fits_is_left_whole() -> None:
    assert chunk_borders(words((0, 10), total=10.0), 10 * RATE, RATE) == [0, 10 * RATE]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 9000), st.integers(1, 3000), st.integers(0, 3))
def test_chunks_are_the_whole_recording(samples: int, longest: int, seed: int) -> None:
    sound = np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)
    borders = chunk_borders(sound, longest, RATE)
    assert (borders[0], borders[-1]) == (0, samples)
    lengths = np.diff(borders)
    assert lengths.min() >= 1 and lengths.max() <= longest


@pytest.mark.parametrize("rate", [RATE, 4410])
def test_files_are_read_in_stretches(rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sound of one stretch in memory, chunks still follow one another without a gap."""
    sound = words((0.2, 6.1), (6.5, 11.4), (11.9, 21.0), total=22.0, rate=rate)
    path = tmp_path / "long.wav"
    soundfile.write(path, sound, rate, subtype="FLOAT")
    whole = list(read_chunks(path, 4 * RATE, RATE))
    monkeypatch.setattr(chunks, "STRETCH_SECONDS", 7)
    found = list(read_chunks(path, 4 * RATE, RATE))
    for parts in (whole, found):
        assert parts[0].clip.start == 0 and parts[-1].clip.end == pytest.approx(22.0, abs=1e-3)
        assert [part.clip.end for part in parts[:-1]] == [part.clip.start for part in parts[1:]]
        assert all(len(part.sound) <= 4 * RATE for part in parts)
    assert sum(len(part.sound) for part in found) == pytest.approx(22 * RATE, abs=len(found))
    if rate == RATE:
        assert np.array_equal(np.concatenate([part.sound for part in found]), sound)


def test_silence_is_known(tmp_path: Path) -> None:
    path = tmp_path / "quiet.wav"
    soundfile.write(path, np.zeros(3 * RATE), RATE)
    assert [chunk.is_silent for chunk in read_chunks(path, RATE, RATE)] == [True] * 3
    soundfile.write(path, words((0, 1), total=1.0), RATE)
    assert [chunk.is_silent for chunk in read_chunks(path, RATE, RATE)] == [False]


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(RecordingError, match=r"text\.wav"):
        list(read_chunks(tmp_path / "text.wav", RATE, RATE))
