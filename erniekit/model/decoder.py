"""The decoder of every family: an ordered list of stages (embedding, N layers, final norm, head).

Shapes: B batch, S tokens, H hidden size, N query heads, K key heads, D head size. Parameter names inside a stage are
Hugging Face's; `Decoder.named_stages` gives each stage's prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.activation import swiglu
from erniekit.model.configuration import ModelConfig
from erniekit.model.linear import ZEROS, Linear
from erniekit.model.norm import RMSNorm
from erniekit.model.randomness import Randomness, Site, dropout
from erniekit.model.recompute import Recompute
from erniekit.model.rope_scaling import rotary_frequencies
from erniekit.model.rotary import RotaryTables, rotary_tables, rotate


class Attends(Protocol):
    """What a layer needs from an attention plan or a key-value cache."""

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int,
        dropout: float,
        key: Sequence[int],
    ) -> paddle.Tensor: ...


@dataclass(frozen=True)
class BatchContext:
    """What all layers share while they compute one batch."""

    query_rotation: RotaryTables
    key_rotation: RotaryTables
    plan: Attends


class Embedding(nn.Layer):
    """Token ids [B, S] -> hidden states [B, S, H]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = self.create_parameter([config.vocab_size, config.hidden_size], default_initializer=ZEROS)

    def forward(self, input_ids_BS: paddle.Tensor) -> paddle.Tensor:
        return F.embedding(input_ids_BS, self.weight)


class SelfAttention(nn.Layer):
    """Grouped-query attention with rotary position embeddings, in some families with normalised queries and keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, config.has_bias("q_proj"))
        self.k_proj = Linear(config.hidden_size, keys, config.has_bias("k_proj"))
        self.v_proj = Linear(config.hidden_size, keys, config.has_bias("v_proj"))
        self.o_proj = Linear(queries, config.hidden_size, config.has_bias("o_proj"))
        qk_norm = config.family.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(self, x_BSH: paddle.Tensor, context: BatchContext, dropout: float, key: Sequence[int]) -> paddle.Tensor:
        batch, length, _ = x_BSH.shape
        by_token = [batch * length, -1, self.head_dim]
        heads = [batch, length, -1, self.head_dim]
        q, k = self.q_proj(x_BSH).reshape(by_token), self.k_proj(x_BSH).reshape(by_token)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, context.query_rotation).reshape(heads)
        k = rotate(k, context.key_rotation).reshape(heads)
        v = self.v_proj(x_BSH).reshape(heads)
        out = context.plan.attend(q, k, v, layer=self.layer, dropout=dropout, key=key)
        return self.o_proj(out.reshape([batch, length, -1]))


class MLP(nn.Layer):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.has_bias("gate_proj"))
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.has_bias("up_proj"))
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.has_bias("down_proj"))

    def forward(self, x_BSH: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_BSH), self.up_proj(x_BSH)))


class DecoderLayer(nn.Layer):
    """Pre-norm residual block; hidden dropout acts on both branches just before they are added."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        randomness: Randomness,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer, self.randomness = layer, randomness
        self.hidden_dropout, self.attention_dropout = hidden_dropout, attention_dropout
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BSH: paddle.Tensor, context: BatchContext) -> paddle.Tensor:
        scale = self.randomness.dropout_scale if self.training else 0.0
        hidden_dropout = self.hidden_dropout * scale

        key = self.randomness.key(self.layer, Site.ATTENTION_PROBABILITIES)
        branch = self.self_attn(self.input_layernorm(x_BSH), context, self.attention_dropout * scale, key)
        x_BSH = x_BSH + dropout(branch, hidden_dropout, self.randomness.key(self.layer, Site.ATTENTION_OUTPUT))

        branch = self.mlp(self.post_attention_layernorm(x_BSH))
        return x_BSH + dropout(branch, hidden_dropout, self.randomness.key(self.layer, Site.MLP_OUTPUT))


class Head(nn.Layer):
    """Hidden states [..., H] -> logits [..., V]. With tied embeddings it has no weight of its own."""

    def __init__(self, config: ModelConfig, embedding: Embedding) -> None:
        super().__init__()
        if config.tie_word_embeddings:
            self._owner = [embedding]  # in a list, so that Paddle does not register it a second time
        else:
            self.weight = self.create_parameter([config.vocab_size, config.hidden_size], default_initializer=ZEROS)
            self._owner = [self]

    @property
    def projection(self) -> paddle.Tensor:
        """W [V, H] of logits = hidden W^T."""
        return self._owner[0].weight

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(hidden, self.projection, transpose_y=True)


class Decoder(nn.Layer):
    """The whole decoder; build it with `builder.build_model`, which also gives it weights."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.randomness = Randomness(seed, rank)
        self.frequencies = rotary_frequencies(config)
        embedding = Embedding(config)
        layers = [
            DecoderLayer(config, layer, self.randomness, hidden_dropout, attention_dropout)
            for layer in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.stages = nn.LayerList([embedding, *layers, norm, Head(config, embedding)])
        self.recompute: Recompute | None = None

    @property
    def embedding(self) -> Embedding:
        return self.stages[0]

    @property
    def layers(self) -> list[DecoderLayer]:
        return list(self.stages)[1:-2]

    @property
    def norm(self) -> RMSNorm:
        return self.stages[-2]

    @property
    def head(self) -> Head:
        return self.stages[-1]

    def named_stages(self) -> Iterator[tuple[str, nn.Layer]]:
        """Every stage with the prefix of its Hugging Face weight names."""
        yield "model.embed_tokens.", self.embedding
        for number, layer in enumerate(self.layers):
            yield f"model.layers.{number}.", layer
        yield "model.norm.", self.norm
        yield "lm_head.", self.head

    def forward(self, input_ids_BS: paddle.Tensor, position_ids_BS: paddle.Tensor, plan: Attends) -> paddle.Tensor:
        """Hidden states [B, S, H] after the final norm; `head.token_loss` or `decoder.head` goes on from there.

        Args:
            input_ids_BS: int64 token ids.
            position_ids_BS: int64 positions, restarting at 0 in every document.
            plan: an `AttentionPlan` of the batch, or a `generation.KeyValueCache`.
        """
        query_rotation, key_rotation = (
            rotary_tables(position_ids_BS, heads, self.frequencies, interleaved=self.config.family.rotary_interleaved)
            for heads in (self.config.num_attention_heads, self.config.num_key_value_heads)
        )
        context = BatchContext(query_rotation, key_rotation, plan)
        hidden_BSH = self.embedding(input_ids_BS)
        for layer in self.layers:
            hidden_BSH = self.recompute(layer, hidden_BSH, context) if self.recompute else layer(hidden_BSH, context)
        return self.norm(hidden_BSH)
