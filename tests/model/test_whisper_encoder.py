"""Silence behind the sound of a window costs nothing where the encoder attends to the sound alone."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.audio_encoder import AudioEncoderSizes
from erniekit.model.architectures.qwen2_audio import POOLED, states_of_frames, tokens_of_frames
from erniekit.model.encoders.whisper_encoder import WhisperEncoder
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL

SIZES = AudioEncoderSizes(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_mel_bins=8,
    max_source_positions=20,
)


@pytest.fixture
def encoder() -> WhisperEncoder:
    """One with random weights."""
    made = WhisperEncoder(SIZES, NO_TENSOR_PARALLEL, pooled=POOLED, states_of_frames=states_of_frames)
    rng = np.random.default_rng(0)
    for parameter in made.parameters():
        parameter.set_value(rng.normal(0, 0.3, parameter.shape).astype(np.float32))
    return made


def counted(encoder: WhisperEncoder) -> list[int]:
    """The list to which each call of the first layer adds the states of its windows."""
    found: list[int] = []
    encoder.layers[0].register_forward_pre_hook(lambda layer, inputs: found.append(inputs[0].shape[1]))
    return found


@pytest.mark.parametrize("frames", [[1], [2], [3, 4], [12, 5], [25], [37], [38], [40]])
def test_states_of_sound_are_those_beside_a_whole_window(frames: list[int], encoder: WhisperEncoder) -> None:
    rng = np.random.default_rng(1)
    windows = len(frames)
    features = rng.normal(size=(windows + 1, 8, 40)).astype(np.float32)
    computed = counted(encoder)
    alone = encoder(paddle.to_tensor(features[:windows]), paddle.to_tensor(frames, "int32")).numpy()
    together = encoder(paddle.to_tensor(features), paddle.to_tensor([*frames, 40], "int32")).numpy()
    assert alone.shape == (windows, 10, 16) and computed == [max(POOLED, states_of_frames(max(frames))), 20]
    for window, heard in enumerate(map(tokens_of_frames, frames)):
        np.testing.assert_allclose(alone[window, :heard], together[window, :heard], atol=1e-5)
        assert not alone[window, max(1, tokens_of_frames(max(frames))) :].any()
