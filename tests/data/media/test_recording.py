"""Recordings of every format, rate and number of channels, and what is told of those that cannot be read."""

from __future__ import annotations

import os
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import clip_length, read_clip
from erniekit.errors import DataError
from tests.data.media.sounds import RATE, noise, tone, write

# name, what soundfile writes, the largest difference that the format makes
FORMATS = {
    "pcm.wav": ({"subtype": "PCM_16"}, 1e-4),
    "float.wav": ({"subtype": "FLOAT"}, 0.0),
    "ulaw.wav": ({"subtype": "ULAW"}, 0.02),
    "s.flac": ({}, 1e-4),
    "s.ogg": ({}, 0.1),
    "s.mp3": ({}, 0.1),
    "opus.ogg": ({"subtype": "OPUS"}, 0.2),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_sound_that_was_written(tmp_path, name):
    options, tolerance = FORMATS[name]
    sound = tone(0.7)
    clip = Clip(write(tmp_path / name, sound, **options))
    found = read_clip(clip)
    assert found.dtype == np.float32 and len(found) == clip_length(clip) == len(sound)
    assert np.abs(found - sound)[800:-800].max() <= tolerance


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000, 96000]),
    frames=st.integers(1, 5000),
    channels=st.integers(1, 3),
    span=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_the_header_tells_the_length_of_what_is_read(tmp_path, rate, frames, channels, span):
    sound = noise(frames, channels)
    path = write(tmp_path / "sound.wav", sound, rate, subtype="FLOAT")
    assert clip_length(Clip(path)) == len(read_clip(Clip(path))) == -(-frames * RATE // rate)
    start, end = sorted(place * frames / rate for place in span)
    clip = Clip(path, start, end)
    first, last = min(round(start * rate), frames - 1), round(end * rate)
    if last <= first or start >= end or start >= frames / rate:
        with pytest.raises(RecordingError):
            clip_length(clip)
        return
    found = read_clip(clip)
    assert clip_length(clip) == len(found) == -(-(last - first) * RATE // rate)
    if rate == RATE:
        mean = sound.reshape(frames, channels).mean(axis=1)[first:last]
        np.testing.assert_allclose(found, mean, atol=1e-7)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_a_tone_stays_a_tone_at_another_rate(tmp_path, rate):
    found = read_clip(Clip(write(tmp_path / "tone.wav", tone(1.0, rate), rate, subtype="FLOAT")))
    np.testing.assert_allclose(found[400:-400], tone(1.0)[400:-400], atol=1e-3)


def test_a_tone_that_the_rate_cannot_hold_is_gone(tmp_path):
    found = read_clip(Clip(write(tmp_path / "high.wav", tone(1.0, 48_000, 12_000), 48_000)))
    assert np.abs(found[400:-400]).max() < 1e-3


@pytest.mark.parametrize("name", ["s.wav", "s.flac", "s.ogg", "s.mp3"])
def test_clips_are_stretches_of_the_whole_recording(tmp_path, name):
    path = write(tmp_path / name, noise(3 * 44_100, 2), 44_100)
    whole = read_clip(Clip(path), 44_100)
    for start, end in ((0.0, 0.5), (1.25, 2.5), (2.9, None)):
        part = read_clip(Clip(path, start, end), 44_100)
        first = round(start * 44_100)
        assert len(part) == clip_length(Clip(path, start, end), 44_100)
        np.testing.assert_allclose(part, whole[first : first + len(part)], atol=1e-6)


def test_long_recordings_are_decoded_in_blocks_without_a_seam(tmp_path, monkeypatch):
    path = write(tmp_path / "s.wav", noise(50_000, 2), 44_100)
    whole = read_clip(Clip(path))
    monkeypatch.setattr("erniekit.data.media.recording.BLOCK_VALUES", 1000)
    np.testing.assert_allclose(read_clip(Clip(path)), whole, atol=1e-6)


def refusal(clip: Clip) -> str:
    with pytest.raises(RecordingError) as refused:
        read_clip(clip)
    message = str(refused.value)
    assert message.startswith(str(Path(clip.path)))
    return message


def test_what_is_no_recording_is_named(tmp_path):
    assert "no such file" in refusal(Clip(str(tmp_path / "gone.wav")))
    assert "a folder" in refusal(Clip(str(tmp_path)))
    for name, content, reason in (
        ("none.wav", b"", "an empty file"),
        ("text.wav", b"a text\n" * 9, "convert it, `ffmpeg"),
        ("samples.raw", bytes(100), "convert it, `ffmpeg"),
    ):
        (tmp_path / name).write_bytes(content)
        assert reason in refusal(Clip(str(tmp_path / name)))
    os.mkfifo(tmp_path / "pipe.wav")
    assert "a pipe" in refusal(Clip(str(tmp_path / "pipe.wav")))
    assert "an empty recording" in refusal(Clip(write(tmp_path / "empty.wav", np.zeros(0, np.float32))))
    assert "samples a second" in refusal(Clip(write(tmp_path / "slow.wav", tone(0.1), 10)))


@pytest.mark.parametrize("name", ["s.wav", "s.aiff", "s.flac", "s.mp3"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_recordings_that_are_cut_off_are_refused(tmp_path, name, kept):
    path = Path(write(tmp_path / name, noise(40_000)))
    content = path.read_bytes()
    path.write_bytes(content[: round(len(content) * kept)])
    assert "cut off" in refusal(Clip(str(path)))
    if name in ("s.wav", "s.aiff") or (name == "s.mp3" and kept < 0.5):  # others do not show it before they are decoded
        with pytest.raises(RecordingError, match="cut off"):
            clip_length(Clip(str(path)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["s.wav", "s.flac", "s.ogg", "s.mp3", "s.aiff"]),
    damage=st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), min_size=1, max_size=4),
    kept=st.floats(0.2, 1),
)
def test_damaged_files_give_sound_of_the_told_length_or_a_refusal(tmp_path, name, damage, kept):
    path = Path(write(tmp_path / name, noise(3000, 2)))
    content = bytearray(path.read_bytes())
    for place, value in damage:
        content[place % len(content)] = value
    path.write_bytes(content[: round(len(content) * kept)])
    try:
        length = clip_length(Clip(str(path)))
        found = read_clip(Clip(str(path)))
    except RecordingError as error:
        assert str(error).startswith(str(path))
    else:
        assert len(found) == length and np.isfinite(found).all()


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_F000])
def test_wav_that_was_written_into_a_pipe_lasts_to_the_end_of_the_file(tmp_path, size):
    path = Path(write(tmp_path / "s.wav", tone(0.5)))
    content = bytearray(path.read_bytes())
    content[40:44] = struct.pack("<I", size)
    path.write_bytes(content)
    assert clip_length(Clip(str(path))) == len(read_clip(Clip(str(path)))) == RATE // 2


def test_a_header_that_counts_itself_is_no_damage(tmp_path):
    path = Path(write(tmp_path / "s.wav", tone(0.5)))
    content = bytearray(path.read_bytes())
    content[40:44] = struct.pack("<I", len(content))
    path.write_bytes(content)
    assert clip_length(Clip(str(path))) == len(read_clip(Clip(str(path)))) == RATE // 2


def test_flac_of_unknown_length_is_refused_with_the_command_that_mends_it(tmp_path):
    path = Path(write(tmp_path / "s.flac", tone(0.5)))
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0
    content[22:26] = bytes(4)  # 36 bits of STREAMINFO are the number of samples, 0 for unknown
    path.write_bytes(content)
    assert "rewrite it, `ffmpeg" in refusal(Clip(str(path)))


def test_mp3_whose_header_tells_a_wrong_length_is_refused(tmp_path):
    sound = (tone(8.0) * np.repeat(np.random.default_rng(0).random(8), RATE)).astype(np.float32)
    path = tmp_path / "s.mp3"
    soundfile.write(path, sound, RATE, bitrate_mode="VARIABLE", compression_level=0.3)
    content = path.read_bytes()
    assert clip_length(Clip(str(path))) == len(sound)
    second = next(place for place in range(40, len(content)) if content[place : place + 2] == content[:2])
    for wrong in (content + content, content[second:]):  # joined; without the frame that counts the others
        path.write_bytes(wrong)
        assert "`ffmpeg -i OLD.mp3 -c copy NEW.mp3`" in refusal(Clip(str(path)))
    path.write_bytes(b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + content + b"TAG" + bytes(125))
    assert clip_length(Clip(str(path))) == len(read_clip(Clip(str(path)))) == len(sound)


def test_clips_outside_of_the_recording_are_refused(tmp_path):
    path = write(tmp_path / "s.wav", tone(1.0))
    for start, end in ((1.0, None), (-0.1, None), (np.nan, None), (0.5, 0.5), (0.5, 0.2), (0.0, 1.2), (0.1, 0.10001)):
        assert "expected" in refusal(Clip(path, start, end))
    assert clip_length(Clip(path, 0.5, 1.05)) == RATE // 2  # lists of segments round their times


@pytest.mark.parametrize("value, told", [(np.nan, "NaN"), (np.inf, "NaN or infinity"), (32_000.0, "32,000")])
def test_values_that_are_no_sound_are_refused(tmp_path, value, told):
    sound = tone(0.5)
    sound[700] = value
    assert told in refusal(Clip(write(tmp_path / "s.wav", sound, subtype="FLOAT")))


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "s.wav", tone(0.1), 8000)
    monkeypatch.setitem(__import__("sys").modules, "soxr", None)
    with pytest.raises(DataError, match=r"soxr \(pip install 'erniekit\[audio\]'\)"):
        read_clip(Clip(path))
    with pytest.raises(DataError, match=r"8000 samples a second: .* soxr"):
        clip_length(Clip(path))  # before a run, which would stop at the first such recording
    assert clip_length(Clip(path), 8000) == 1600
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(DataError, match=r"soundfile \(pip install 'erniekit\[audio\]'\)"):
        clip_length(Clip(path))


def test_reading_leaves_neither_memory_nor_open_files(tmp_path):
    """Eight threads, as those that read ahead; ten times as many clips take no more."""
    clips = [Clip(write(tmp_path / f"s.{kind}", noise(800, 2), 8000), 0.01, 0.05) for kind in ("wav", "flac", "ogg")]
    expected = [read_clip(clip) for clip in clips]

    def read(number: int) -> bool:
        return bool((read_clip(clips[number % 3]) == expected[number % 3]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(60)))
        handles = len(os.listdir("/proc/self/fd"))
        tracemalloc.start()
        assert all(pool.map(read, range(30)))
        before = tracemalloc.get_traced_memory()[0]
        assert all(pool.map(read, range(300)))
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert grown < 200_000 and len(os.listdir("/proc/self/fd")) <= handles
