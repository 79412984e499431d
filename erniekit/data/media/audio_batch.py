"""The recordings of a batch as a model's encoder takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from erniekit.data.media.clip import AudioInputs, PlacedClip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.log_mel import log_mel
from erniekit.data.media.recording import read_clip

if TYPE_CHECKING:
    from erniekit.data.templates.ernie import Sample


def audio_arrays(
    rows: Sequence[Sequence[Sample]],
    shape: tuple[int, int],
    inputs: AudioInputs,
    read: Callable[[PlacedClip, AudioInputs], np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Read the recordings of a batch, and say at which positions the states of the encoder stand.

    Args:
        rows: the samples of each row, which lie one after the other.
        shape: B and S, of the batch.
        read: returns the sound of a clip; default: `read_placed`, which reads its file.

    Returns:
        audio_features: float32[A, M, T], the log-mel spectrograms of all windows in the order of rows and positions,
            each of T = inputs.window_frames; A is 0 for a batch without recordings.
        audio_frames: int32[A], the frames of each window that hold sound.
        audio_states: int64[B, S], for each placeholder the index of its state among those of all windows,
            A * inputs.window_tokens; -1 at other positions.

    Raises:
        RecordingError: a recording cannot be read, or has another length than when its tokens were counted.
    """
    states = np.full(shape, -1, np.int64)
    features: list[np.ndarray] = []
    frames: list[int] = []
    for row, clip, place in _placed_clips(rows):
        windows = clip_windows((read or read_placed)(clip, inputs), inputs)
        indices = window_states(clip.length, inputs) + len(frames) * inputs.window_tokens
        if len(indices) != clip.tokens:
            raise ValueError(f"{clip}: {clip.tokens} placeholder tokens for {len(indices)} states of the encoder")
        states[row, place : place + clip.tokens] = indices
        features.append(windows)
        frames += window_frames(clip.length, inputs)
    empty = np.empty((0, inputs.mel_bins, inputs.window_frames), np.float32)
    return {
        "audio_features": np.concatenate(features) if features else empty,
        "audio_frames": np.array(frames, np.int32),
        "audio_states": states,
    }


def _placed_clips(rows: Sequence[Sequence[Sample]]) -> Iterator[tuple[int, PlacedClip, int]]:
    """Yield row, clip and the position of its first placeholder in the row."""
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            for clip in sample.clips:
                yield number, clip, start + clip.place
            start += len(sample.input_ids)


def read_placed(placed: PlacedClip, inputs: AudioInputs) -> np.ndarray:
    """Read the sound of a clip whose tokens were counted.

    Raises:
        RecordingError: it cannot be read, or has another length.
    """
    sound = read_clip(placed.clip, inputs.sampling_rate)
    if len(sound) != placed.length:
        expected = f"{placed.length:,} samples, as when the data was tokenised"
        advice = "the file has changed since; tokenise again (delete the folder of the token cache)"
        raise RecordingError(placed.clip, expected, f"{len(sound):,}: {advice}")
    return sound


def window_frames(length: int, inputs: AudioInputs) -> list[int]:
    """Return for each window of a recording of `length` samples the frames that hold sound."""
    frames = -(-length // inputs.hop)
    whole, rest = divmod(frames, inputs.window_frames)
    return [inputs.window_frames] * whole + [rest] * (rest > 0)


def clip_windows(sound: np.ndarray, inputs: AudioInputs) -> np.ndarray:
    """Return the log-mel spectrograms of the windows of a recording, float32[windows, mel_bins, window_frames].

    As in the processor of Voxtral, the spectrogram is made of the whole recording, followed by silence up to a whole
    number of windows, and then cut.
    """
    count = len(window_frames(len(sound), inputs))
    whole = log_mel(
        sound, inputs.mel_bins, count * inputs.window_frames, hop=inputs.hop, sampling_rate=inputs.sampling_rate
    )
    return whole.reshape(inputs.mel_bins, count, inputs.window_frames).transpose(1, 0, 2)


def window_states(length: int, inputs: AudioInputs) -> np.ndarray:
    """Return the states that stand at the placeholders of a recording of `length` samples, in their order.

    int64[inputs.clip_tokens(length)]: w * inputs.window_tokens + t for state t of window w.
    """
    counts = [inputs.tokens_of(frames) for frames in window_frames(length, inputs)]
    starts = [window * inputs.window_tokens + np.arange(count) for window, count in enumerate(counts)]
    return np.concatenate(starts).astype(np.int64)
