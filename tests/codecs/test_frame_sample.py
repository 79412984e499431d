"""A uniform sample of a stream of frames."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.codecs.frame_sample import FrameSample, sample_frames
from erniekit.errors import DataError
from tests.log_capture import captured_log


def numbered(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.float32)[:, None]


def test_a_short_stream_is_kept_whole():
    sample = FrameSample(10)
    sample.add(numbered(0, 4))
    sample.add(numbered(4, 10))
    np.testing.assert_array_equal(sample.frames(), numbered(0, 10))


def test_the_sample_is_uniform_in_order_and_does_not_depend_on_the_groups():
    whole, pieces = FrameSample(1000, seed=1), FrameSample(1000, seed=1)
    whole.add(numbered(0, 20_000))
    for first in range(0, 20_000, 37):
        pieces.add(numbered(first, min(first + 37, 20_000)))
        assert sum(map(len, pieces._kept)) <= 2000
    kept = whole.frames()[:, 0]
    np.testing.assert_array_equal(kept, pieces.frames()[:, 0])
    assert len(kept) == 1000 and (np.diff(kept) > 0).all()
    assert abs(np.histogram(kept, 10, (0, 20_000))[0] - 100).max() < 40
    assert not np.array_equal(kept, sampled_by(2, 20_000))


def sampled_by(seed: int, count: int) -> np.ndarray:
    sample = FrameSample(1000, seed)
    sample.add(numbered(0, count))
    return sample.frames()[:, 0]


def test_it_reads_no_more_seconds_than_it_may():
    read = []

    def sounds():
        for number in range(5):
            read.append(number)
            yield np.full(100, number, np.float32)

    frames = sample_frames(sounds(), lambda sound: sound[:, None], sampling_rate=100, max_frames=999, max_seconds=2.5)
    np.testing.assert_array_equal(np.unique(frames, return_counts=True)[1], [100, 100, 50])
    assert read == [0, 1, 2]


def test_no_sound_is_named():
    with pytest.raises(DataError, match="no sound to fit codes on: expected a recording of at least 400 samples"):
        sample_frames([np.zeros(399, np.float32)], np.atleast_2d, sampling_rate=1, max_frames=1, shortest=400)


def test_fewer_frames_than_codes_are_told():
    sounds = [np.zeros(9, np.float32)]
    for codes, told in ((9, 0), (10, 1)):
        with captured_log() as logged:
            sample_frames(sounds, lambda sound: sound[:, None], sampling_rate=1, codes=codes, max_frames=99)
        assert len(logged) == told and all("10 codes is fitted on 9 frames" in line for line in logged)
