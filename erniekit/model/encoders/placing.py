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

    Batches without a recording run no encoder. With sequence parallelism a rank has the embeddings of its own tokens,
    as [1, B * S / n, H], and places the states of these.

    Args:
        inputs: `audio_features`, `audio_frames` and `audio_states`, see `audio_encoder.embed_audio`; all may be absent.
    """
    features_AMT = inputs.get("audio_features")
    if features_AMT is None or features_AMT.shape[0] == 0:
        return embeddings_BSH
    encoder, projector = decoder.towers
    states = projector(encoder(features_AMT, inputs["audio_frames"])).astype(embeddings_BSH.dtype)
    if decoder.tp.sequence_parallel_active:  # each rank's tokens give a part of the gradient, and the encoder needs all
        states = replace(decoder.tp, sequence_parallel=False).copy_to_tp(states)
    places = decoder.tp.local_tokens(inputs["audio_states"])
    is_placed = (places >= 0).unsqueeze(-1)
    found = F.embedding(paddle.maximum(places, paddle.zeros_like(places)), states)
    return paddle.where(is_placed, found, embeddings_BSH)
