"""Recordings are encoded by several processes, in order, and what cannot be encoded is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from erniekit.codecs.workers import Encoded, Failed, Reading, Skipped, encode_clip, encode_clips
from erniekit.data.media.clip import Clip
from erniekit.errors import DataError
from tests.codecs.fakes import FRAME, LoudnessCodec, open_loudness
from tests.data.media.sounds import RATE, tone, write


def clip_of(path: Path, frames: float, loudness: float = 1.0) -> Clip:
    return Clip(write(path, loudness * tone(frames * FRAME / RATE, RATE)))


def test_results_come_in_order_from_two_processes(tmp_path: Path) -> None:
    clips = [clip_of(tmp_path / f"{number}.wav", number) for number in (5, 1, 9, 3)]
    clips.insert(2, Clip(str(tmp_path / "missing.wav")))
    found = list(encode_clips(iter(clips), open_loudness, Reading(), 2))
    frames = [item.codes.shape[1] if isinstance(item, Encoded) else item for item in found]
    assert frames[:2] + frames[3:] == [5, 1, 9, 3]
    assert isinstance(found[2], Failed) and "missing.wav: expected a recording, got no such file" in found[2].reason
    assert [item.seconds for item in found if isinstance(item, Encoded)] == [0.05, 0.01, 0.09, 0.03]


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has ended without a word.*codes_workers"):
        list(encode_clips([clip_of(tmp_path / "17.wav", 17)], open_loudness, Reading(), 1))


def test_processes_do_not_hear_what_a_terminal_sends_to_all(tmp_path: Path) -> None:
    def clips() -> Iterator[Clip]:
        yield clip_of(tmp_path / "3.wav", 3)
        (process,) = multiprocessing.active_children()
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # while it is still importing
            os.kill(process.pid, sent)

    (found,) = encode_clips(clips(), open_loudness, Reading(), 1)
    assert isinstance(found, Encoded)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_too_short_and_too_long_recordings_are_skipped(tmp_path: Path) -> None:
    clips = [clip_of(tmp_path / f"{number}.wav", number) for number in (1, 5, 9)]
    found = [encode_clip(LoudnessCodec(), clip, Reading(0.02, 0.08)) for clip in clips]
    assert [type(item) for item in found] == [Skipped, Encoded, Skipped]
    assert [item.seconds for item in found if isinstance(item, Skipped)] == [0.01, 0.09]


def test_the_peak_is_that_of_the_parameter(tmp_path: Path) -> None:
    quiet, silent = clip_of(tmp_path / "q.wav", 4, 0.1), clip_of(tmp_path / "s.wav", 4, 0.0)

    def loudest(clip: Clip, peak: float) -> int:
        result = encode_clip(LoudnessCodec(), clip, Reading(peak=peak))
        assert isinstance(result, Encoded)
        return int(result.codes[0].max())

    assert [loudest(quiet, peak) for peak in (0.0, 0.51, 1.0)] == [0, 8, 15]
    assert loudest(silent, 0.9) == 0
    faint = np.full(4 * FRAME, 1e-41, np.float32)  # so faint that float32 cannot hold the scale
    assert loudest(Clip(write(tmp_path / "faint.wav", faint, subtype="FLOAT")), 0.9) == 0


def test_what_the_codec_cannot_take_is_an_error_of_the_recording(tmp_path: Path) -> None:
    refused = encode_clip(LoudnessCodec(), clip_of(tmp_path / "13.wav", 13), Reading())
    short = encode_clip(LoudnessCodec(), clip_of(tmp_path / "short.wav", 0.5), Reading())
    assert isinstance(refused, Failed) and refused.reason.endswith("13.wav: the codec cannot take 13 frames")
    assert isinstance(short, Failed) and "80 samples are too short for a frame of the codec" in short.reason
    assert np.array_equal(LoudnessCodec().decode(np.array([[8]])), np.full(FRAME, 0.5, np.float32))


def test_a_missing_package_is_no_error_of_each_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = clip_of(tmp_path / "a.wav", 4)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DataError, match="install soundfile"):
        encode_clip(LoudnessCodec(), clip, Reading())
