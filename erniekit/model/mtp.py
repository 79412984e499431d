"""Multi-token prediction: extra layers that predict the tokens after the next one, as in ERNIE-4.5.

DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2. Depth d from 1 reads, at position i, the state of depth d - 1 and the
embedding of token i + d, and predicts token i + d + 1. Embedding, final norm and head are the model's.
"""

from __future__ import annotations

import numpy as np
import paddle
from paddle import nn

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder_layer import DecoderLayer
from erniekit.model.linear import Linear
from erniekit.model.norm import RMSNorm


class MultiTokenPrediction(nn.Layer):
    """One depth: the projection that combines state and embedding, and a decoder layer."""

    def __init__(self, config: ModelConfig, block: DecoderLayer) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.block = block
        self.emb_norm, self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps), RMSNorm(hidden, config.rms_norm_eps)
        self.linear_proj = Linear(2 * hidden, hidden)

    def combine_inputs(self, embedding_BSH: paddle.Tensor, hidden_BSH: paddle.Tensor) -> paddle.Tensor:
        """Return [norm(embedding); norm(hidden)] W, the input [B, S, H] of `block`; `hidden_BSH` is before the final
        norm."""
        both = paddle.concat([self.emb_norm(embedding_BSH), self.hidden_norm(hidden_BSH)], axis=-1)
        return self.linear_proj(both)


def shift_within_documents(values_BS: np.ndarray, document_ends_BS: np.ndarray, offset: int, fill: int) -> np.ndarray:
    """Return for each position the value `offset` positions ahead in the same document, or `fill` beyond its end.

    Args:
        document_ends_BS: for each position the index in its row just after its document; for padding, at most the
            position itself.
    """
    positions = np.arange(values_BS.shape[1])
    shifted = np.full_like(values_BS, fill)
    shifted[:, :-offset] = values_BS[:, offset:]
    return np.where(positions + offset < document_ends_BS, shifted, fill)
