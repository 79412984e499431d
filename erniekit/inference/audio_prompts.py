"""The recordings of prompts: batches that fit into memory, and the arrays that a model reads beside the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from erniekit.data.media.audio_batch import audio_arrays, read_placed, window_frames
from erniekit.data.media.clip import AudioInputs, PlacedClip
from erniekit.data.placeholders import EncodedPrompt
from erniekit.data.templates.ernie import Sample

MAX_FRAMES = 24_000  # of the windows in a batch: 8 windows of 30 s, whose attention bounds the memory

ReadClip = Callable[[PlacedClip, AudioInputs], np.ndarray]


def prompt_audio(
    prompts: Sequence[EncodedPrompt], inputs: AudioInputs | None, read: ReadClip = read_placed
) -> Mapping[str, np.ndarray] | None:
    """Return the arrays `audio_features`, `audio_frames` and `audio_states` of a batch of prompts, padded on the right
    to the longest; None if no prompt has a recording.

    Args:
        inputs: what the model's encoder takes.
        read: returns the sound of a clip, float32[length].

    Raises:
        RecordingError: a recording cannot be read, or has changed since its prompt was encoded.
    """
    if not any(prompt.clips for prompt in prompts):
        return None
    assert inputs is not None, "prompts of a model without an encoder have no recordings"
    ids = [np.array(prompt.ids, np.int32) for prompt in prompts]
    rows = [[Sample(own, own, clips=prompt.clips)] for own, prompt in zip(ids, prompts, strict=True)]
    return audio_arrays(rows, (len(rows), max(map(len, ids))), inputs, read)


def batches(
    prompts: Sequence[EncodedPrompt], order: Sequence[int], size: int, inputs: AudioInputs | None
) -> Iterator[list[int]]:
    """Yield the numbers of the prompts in batches, in this order: at most `size`, and no more windows of recordings
    than memory is meant for, unless one prompt has more."""
    batch: list[int] = []
    frames = 0
    for number in order:
        own = _frames(prompts[number], inputs)
        if batch and (len(batch) == size or frames + own > MAX_FRAMES):
            yield batch
            batch, frames = [], 0
        batch.append(number)
        frames += own
    if batch:
        yield batch


def _frames(prompt: EncodedPrompt, inputs: AudioInputs | None) -> int:
    if inputs is None:
        return 0
    return sum(len(window_frames(clip.length, inputs)) for clip in prompt.clips) * inputs.window_frames
