"""Estimate what an audio encoder and its projector compute, keep for backward, and use for a moment.

The tensors follow `model/encoders/`. Letters: W windows of a micro-batch, S states of a window, H channels, I channels
of an MLP. Needs no Paddle or NumPy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from erniekit.model.architectures.audio_encoder import FRAMES_PER_STATE, audio_sizes
from erniekit.model.architectures.parts import ALIGNER, AUDIO, part_sizes, trainable_shapes

if TYPE_CHECKING:
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig


def windows_of(model: ModelConfig, tokens: int) -> int:
    """Return how many windows a micro-batch of so many tokens has at most: those that fill it with placeholders."""
    assert model.architecture.audio is not None
    return max(1, tokens // model.architecture.audio(model).window_tokens)


def encoder_cost(model: ModelConfig) -> float:
    """Return how many weights an encoder and its projector are multiplied with for each of their tokens; 0 without."""
    if model.architecture.audio is None:
        return 0.0
    states = audio_sizes(model).max_source_positions / model.architecture.audio(model).window_tokens
    sizes = part_sizes(model.architecture, trainable_shapes(model))
    return states * sizes[AUDIO] + sizes[ALIGNER]


def encoder_values(
    model: ModelConfig,
    windows: int,
    topology: Topology,
    *,
    trained: Collection[str],
    recompute: bool,
    kept_scores: int,
) -> tuple[int, int]:
    """Return the values that encoder and projector save for backward, and the most that a part of them uses meanwhile.

    Args:
        trained: which of the two parts are trained; a frozen encoder saves nothing, because nothing before it has a
            gradient.
        recompute: layers keep their input and compute the rest again in backward.
        kept_scores: attention saves at most so many probabilities of a layer; above them it computes them again.
    """
    assert model.architecture.audio is not None
    sizes, degree = audio_sizes(model), topology.tensor
    states = windows * sizes.max_source_positions
    hidden, inner = states * sizes.hidden_size, states * sizes.intermediate_size // degree
    scores = sizes.num_attention_heads // degree * states * sizes.max_source_positions
    # both residual streams, both normalised inputs, queries, keys, values and what they give, the MLP before and after
    # its GELU
    layer = 4 * hidden + 4 * hidden // degree + 2 * inner + min(scores, kept_scores)
    # the spectrogram, both convolutions before and after their GELU, the positions
    front = windows * sizes.window_frames * sizes.num_mel_bins + (2 * FRAMES_PER_STATE + 3) * hidden
    behind = 2 * hidden + 3 * windows * model.architecture.audio(model).window_tokens * model.hidden_size
    saved = behind if trained else 0
    if AUDIO not in trained:
        return saved, max(front, layer)
    backward = 2 * hidden + inner
    if recompute:
        return saved + front + sizes.num_hidden_layers * hidden, layer + backward
    return saved + front + sizes.num_hidden_layers * layer, backward
