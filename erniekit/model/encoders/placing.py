"""Put the states of an encoder in the places of the embeddings of their placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import paddle
import paddle.nn.functional as F

if TYPE_CHECKING:
    from erniekit.model.decoder import Decoder


def place_states(decoder: Decoder, embeddings_BSH: paddle.Tensor, inputs: Mapping[str, paddle.Tensor]) -> paddle.Tensor:
    """Return the embeddings with the states of the decoder's audio encoder where `audio_states` names one.

    A batch without a recording encodes the silence of one token, which stands nowhere and has a gradient of zeros, so
    that ranks which share the weights reach all of them in the same order, whatever their batches hold. With sequence
    parallelism a rank has the embeddings of its own tokens, as [1, B * S / n, H], and places the states of these.

    Args:
        inputs: `audio_features`, `audio_frames` and `audio_states`, see `audio_encoder.embed_audio`; all may be absent.
    """
    if "audio_features" not in inputs:
        return embeddings_BSH
    encoder, projector = decoder.towers
    windows = inputs["audio_features"], inputs["audio_frames"]
    if not windows[0].shape[0]:
        windows = _silence(decoder, *windows)
    states = projector(encoder(*windows, recompute=decoder.recompute)).astype(embeddings_BSH.dtype)
    if decoder.tp.sequence_parallel_active:  # each rank's tokens give a part of the gradient, and the encoder needs all
        states = replace(decoder.tp, sequence_parallel=False).copy_to_tp(states)
    places = decoder.tp.local_tokens(inputs["audio_states"])
    is_placed = (places >= 0).unsqueeze(-1)
    found = F.embedding(paddle.maximum(places, paddle.zeros_like(places)), states)
    return paddle.where(is_placed, found, embeddings_BSH)


def _silence(
    decoder: Decoder, features_AMT: paddle.Tensor, frames_A: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return a window that is just long enough for one token, like these windows, of which there is none."""
    of_model = decoder.config.architecture.audio
    assert of_model is not None, "only a model with an encoder has windows"
    audio = of_model(decoder.config)
    frames = audio.window_frames // audio.window_tokens
    return paddle.zeros([1, audio.mel_bins, frames], features_AMT.dtype), paddle.full([1], frames, frames_A.dtype)
