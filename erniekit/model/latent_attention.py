"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1).

Queries, and keys with values, pass a narrow normalised latent. Of each query and key the last channels are turned;
those of keys come from the input directly, and all heads share them.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder_layer import BatchContext, query_scale
from erniekit.model.linear import Linear
from erniekit.model.norm import RMSNorm
from erniekit.model.rope import apply_rotary
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

LATENT_EPSILON = 1e-6  # whatever `rms_norm_eps` is, as in transformers


class LatentAttention(nn.Layer):
    """Attention whose queries, keys and values pass latents, in the place of `SelfAttention`.

    The ranks of `tp` divide the heads; each has the projections to latents whole, and computes them of its own tokens.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        own, hidden, heads = config.own, config.hidden_size, config.num_attention_heads
        self.layer, self.tp, self.turned, self.kept = layer, tp, config.head_dim, own["qk_nope_head_dim"]
        self.head_dim, self.value_dim = self.kept + self.turned, own["v_head_dim"]
        self.query_scale = query_scale(config, self.head_dim)
        self.query_rank, self.rank = own["q_lora_rank"], own["kv_lora_rank"]
        if self.query_rank is None:
            self.q_proj = Linear(hidden, heads * self.head_dim, tp=tp, shard_along="outputs")
        else:
            self.q_a_proj = Linear(hidden, self.query_rank, config.has_bias("q_a_proj"))
            self.q_a_layernorm = RMSNorm(self.query_rank, LATENT_EPSILON)
            self.q_b_proj = Linear(self.query_rank, heads * self.head_dim, tp=tp, shard_along="outputs")
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.turned, config.has_bias("kv_a_proj_with_mqa"))
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPSILON)
        self.kv_b_proj = Linear(self.rank, heads * (self.kept + self.value_dim), tp=tp, shard_along="outputs")
        bias = config.has_bias("o_proj")
        self.o_proj = Linear(heads * self.value_dim, hidden, bias, tp=tp, shard_along="inputs")

    def forward(self, x_BSH: paddle.Tensor, context: BatchContext, dropout: float, key: Sequence[int]) -> paddle.Tensor:
        batch, length = context.shape if self.tp.sequence_parallel_active else x_BSH.shape[:2]
        by_head = [batch * length, -1, self.head_dim]
        if self.query_rank is None:
            q = self.q_proj(self.tp.copy_to_tp(x_BSH))
        else:
            q = self.q_b_proj(self.tp.copy_to_tp(self.q_a_layernorm(self.q_a_proj(x_BSH))))
        q = q.reshape(by_head)
        latents = self.kv_a_proj_with_mqa(x_BSH)
        normalised = self.kv_a_layernorm(latents[..., : self.rank]).astype(latents.dtype)
        latents = self.tp.copy_to_tp(paddle.concat([normalised, latents[..., self.rank :]], axis=-1))
        both = self.kv_b_proj(latents[..., : self.rank]).reshape([batch * length, -1, self.kept + self.value_dim])
        turned = latents[..., self.rank :].reshape([batch * length, 1, self.turned])
        turned = turned.expand([-1, both.shape[1], -1]).astype(both.dtype)
        k = paddle.concat([both[..., : self.kept], turned], axis=-1)
        rotation = context.rotations[0]
        q, k = apply_rotary(q, rotation.queries), apply_rotary(k, rotation.keys)
        q = q if self.query_scale == 1.0 else q * self.query_scale
        # Attention wants values as wide as keys; the channels that are added stay 0.
        v = F.pad(both[..., self.kept :], [0, self.head_dim - self.value_dim], data_format="NCL")
        heads = [batch, length, -1, self.head_dim]

        def core(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
            return context.plan.attend(q, k, v, layer=self.layer, dropout=dropout, key=key)

        out = context.run_core_attention(core, q.reshape(heads), k.reshape(heads), v.reshape(heads))
        return self.o_proj(out[..., : self.value_dim].reshape([batch, length, -1]))
