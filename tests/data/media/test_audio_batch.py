"""Windows, and the encoder's states at the placeholders of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.media.audio_batch import audio_arrays, clip_windows, window_frames, window_states
from erniekit.data.media.clip import AudioInputs, Clip, PlacedClip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.log_mel import log_mel
from erniekit.data.templates.ernie import Sample
from tests.data.media.sounds import noise, write

PLACEHOLDER = 9
# As Qwen2-Audio counts them: a convolution of stride 2, and pooling of 2; as Voxtral: all states of every window.
COUNTS = {"real": lambda frames: ((frames - 1) // 2 - 1) // 2 + 1, "all": lambda frames: 10}


def inputs_of(count: str, window_frames: int = 40) -> AudioInputs:
    return AudioInputs(PLACEHOLDER, 16, window_frames, window_frames // 4, COUNTS[count])


@given(length=st.integers(1, 60_000), count=st.sampled_from(list(COUNTS)))
def test_windows_and_states_of_a_length(length, count):
    inputs = inputs_of(count)
    frames, states = window_frames(length, inputs), window_states(length, inputs)
    assert sum(frames) == -(-length // 160) and all(each == 40 for each in frames[:-1]) and 0 < frames[-1] <= 40
    assert len(states) == inputs.clip_tokens(length)
    assert (np.diff(states) > 0).all()
    in_window = np.bincount(states // 10, minlength=len(frames))
    assert in_window.tolist() == [inputs.tokens_of(each) for each in frames]
    assert all(state % 10 < in_window[state // 10] for state in states.tolist())


def test_a_fingerprint_knows_every_count():
    inputs = inputs_of("real", 3000)
    one_other = replace(inputs, tokens_of=lambda frames: COUNTS["real"](frames) + (frames == 1234))
    assert inputs.fingerprint == inputs_of("real", 3000).fingerprint != one_other.fingerprint


def test_windows_are_cut_from_the_spectrogram_of_the_whole_recording():
    inputs, sound = inputs_of("all"), noise(16_000)
    windows = clip_windows(sound, inputs)
    assert windows.shape == (3, 16, 40)
    np.testing.assert_array_equal(np.concatenate(list(windows), axis=1), log_mel(sound, 16, 120))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Files of several lengths, with the number of their samples."""
    folder = tmp_path_factory.mktemp("recordings")
    lengths = (900, 6400, 6401, 9000, 20_000)
    return [(write(folder / f"{length}.wav", noise(length, seed=length)), length) for length in lengths]


def make_sample(clips: list[tuple[str, int]], gaps: list[int], inputs: AudioInputs) -> Sample:
    """A sample with text of some length before each clip, and behind the last."""
    ids: list[int] = []
    placed = []
    for (path, length), gap in zip(clips, gaps, strict=False):
        ids += [1] * gap
        tokens = inputs.clip_tokens(length)
        placed.append(PlacedClip(Clip(path), len(ids), tokens, length))
        ids += [PLACEHOLDER] * tokens
    ids += [1] * (gaps[-1] + 1)
    return Sample(np.array(ids, np.int32), np.array(ids, np.int32), clips=tuple(placed))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), count=st.sampled_from(list(COUNTS)))
def test_each_placeholder_of_a_batch_has_its_state(recordings, data, count):
    inputs = inputs_of(count)
    clip = st.lists(st.sampled_from(recordings), max_size=2)
    gaps = st.lists(st.integers(0, 4), min_size=3, max_size=3)
    made = st.builds(make_sample, clip, gaps, st.just(inputs))
    rows = data.draw(st.lists(st.lists(made, max_size=3), min_size=1, max_size=3))
    lengths = [sum(len(sample.input_ids) for sample in row) for row in rows]
    shape = (len(rows), max(1, *lengths, 1) + 2)
    ids = np.zeros(shape, np.int64)
    for row, samples in enumerate(rows):
        if samples:
            ids[row, : lengths[row]] = np.concatenate([sample.input_ids for sample in samples])
    arrays = audio_arrays(rows, shape, inputs)
    features, frames, states = arrays["audio_features"], arrays["audio_frames"], arrays["audio_states"]
    assert features.dtype == np.float32 and features.shape == (len(frames), 16, 40)
    assert frames.dtype == np.int32 and states.dtype == np.int64 and states.shape == shape
    assert ((states >= 0) == (ids == PLACEHOLDER)).all()
    placed = states[states >= 0]
    assert (np.diff(placed) > 0).all() and (placed < len(frames) * inputs.window_tokens).all()
    assert len(placed) == sum(inputs.tokens_of(int(each)) for each in frames)
    first = next((sample.clips[0] for row in rows for sample in row if sample.clips), None)
    if first is not None:
        expected = clip_windows(noise(first.length, seed=first.length), inputs)
        np.testing.assert_allclose(features[: len(expected)], expected, atol=0.02)  # of 16 bits


def test_a_batch_without_recordings_has_the_same_arrays():
    sample = Sample(np.ones(3, np.int32), np.ones(3, np.int32))
    arrays = audio_arrays([[sample], []], (2, 5), inputs_of("all"))
    assert arrays["audio_features"].shape == (0, 16, 40) and arrays["audio_features"].dtype == np.float32
    assert arrays["audio_frames"].shape == (0,) and arrays["audio_frames"].dtype == np.int32
    assert (arrays["audio_states"] == np.full((2, 5), -1)).all()


def test_a_recording_that_has_changed_since_is_named(tmp_path):
    inputs = inputs_of("all")
    path = write(tmp_path / "s.wav", noise(5000))
    sample = make_sample([(path, 5000)], [0], inputs)
    write(tmp_path / "s.wav", noise(5100))
    with pytest.raises(RecordingError, match=r"s\.wav: expected 5,000 samples.*5,100: the file has changed since"):
        audio_arrays([[sample]], (1, 30), inputs)
