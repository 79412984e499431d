"""The recordings of prompts: the arrays that a model reads beside the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from erniekit.data.media.audio_batch import audio_arrays, read_placed
from erniekit.data.media.clip import AudioInputs, PlacedClip
from erniekit.data.placeholders import EncodedPrompt
from erniekit.data.templates.ernie import Sample

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


def prompt_inputs(
    prompt: EncodedPrompt, inputs: AudioInputs | None, read: ReadClip = read_placed
) -> Callable[[], Mapping[str, np.ndarray]] | None:
    """Return what reads the recordings of one prompt when its turn has come; None if it has none."""

    def arrays() -> Mapping[str, np.ndarray]:
        return prompt_audio([prompt], inputs, read) or {}

    return arrays if prompt.clips else None
