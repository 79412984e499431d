"""One layer of the decoder: attention, then an MLP or a layer of experts, each added to the residual stream.

Shapes: B batch, S tokens, H hidden size, N query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import paddle
from paddle import nn

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import (
    ATTENTION_INPUT_NORM,
    ATTENTION_OUTPUT_NORM,
    MLP_INPUT_NORM,
    MLP_OUTPUT_NORM,
)
from erniekit.model.linear import ZEROS, Linear
from erniekit.model.mlp import MLP
from erniekit.model.moe.dispatch import LOCAL_DISPATCHER, TokenDispatcher
from erniekit.model.moe.experts import MoE
from erniekit.model.moe.router import ExpertBalance
from erniekit.model.norm import RMSNorm
from erniekit.model.randomness import Randomness, Site, dropout
from erniekit.model.rope import RotaryTables, apply_rotary, rms_norm_rotary
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class AttentionBackend(Protocol):
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
        window: int | None = None,
        sinks_H: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Attend from each query to the keys before it; with `window` to the last `window` positions, its own included.

        Args:
            sinks_H: for each query head the score of attending to nothing; None: there is no such choice.

        Returns:
            [B, S, H, D].
        """
        ...


def call_directly(function: Callable[..., paddle.Tensor], *arguments: Any) -> paddle.Tensor:
    """Call a part of a layer as it stands, keeping for backward what it keeps."""
    return function(*arguments)


class Rotation(NamedTuple):
    """What turns queries and keys: one rope table at the positions of a batch."""

    queries: RotaryTables
    keys: RotaryTables


@dataclass(frozen=True)
class BatchContext:
    """What all layers share while they compute one batch.

    Attributes:
        rotations: one for each of the architecture's `rope_tables`.
        run_attention, run_core_attention: how a layer calls its attention block, and in it the attention product;
            recomputation puts its own in their place (`recompute.Recompute`).
    """

    rotations: Sequence[Rotation]
    plan: AttentionBackend
    shape: Sequence[int]  # B, S of all tokens; hidden states may be of this rank's part of them
    is_token: paddle.Tensor | None  # [B, S], 1.0 for tokens, 0.0 for padding; None: there is no padding
    run_attention: Callable[..., paddle.Tensor] = call_directly
    run_core_attention: Callable[..., paddle.Tensor] = call_directly


def layer_norm(config: ModelConfig, size: int, tp: TensorParallel = NO_TENSOR_PARALLEL) -> RMSNorm:
    """Return a norm over `size` channels, which the ranks of `tp` divide, as the architecture has them."""
    return RMSNorm(size, config.rms_norm_eps, offset=config.architecture.norm_offset, tp=tp)


def query_scale(config: ModelConfig, head_dim: int) -> float:
    """Return what multiplies queries, so that a product which divides scores by sqrt(D) gives the architecture's."""
    attention = config.architecture.multipliers(config).attention
    return 1.0 if attention is None else attention * head_dim**0.5


class SelfAttention(nn.Layer):
    """Grouped-query attention with rotary position embeddings; queries and keys may be normalised.

    The ranks of `tensor` divide the heads.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.layer, self.head_dim, self.tp = layer, config.head_dim, tp
        architecture = config.architecture
        self.window, self.rope = architecture.layer_attention(config, layer)
        self.query_scale = query_scale(config, config.head_dim)

        def linear(name: str, inputs: int, outputs: int, shard_along: Literal["inputs", "outputs"]) -> Linear:
            return Linear(inputs, outputs, config.has_bias(name), tp=tp, shard_along=shard_along)

        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = linear("q_proj", config.hidden_size, queries, "outputs")
        self.k_proj = linear("k_proj", config.hidden_size, keys, "outputs")
        self.v_proj = linear("v_proj", config.hidden_size, keys, "outputs")
        self.o_proj = linear("o_proj", queries, config.hidden_size, "inputs")
        self.has_sinks = architecture.attention_sinks
        if self.has_sinks:
            heads = tp.local_size(config.num_attention_heads)
            self.sinks = self.create_parameter([heads], default_initializer=ZEROS)
        self.normalises = architecture.qk_norm
        if self.normalises == "head":
            self.q_norm, self.k_norm = layer_norm(config, config.head_dim), layer_norm(config, config.head_dim)
        elif self.normalises == "projection":
            self.q_norm, self.k_norm = layer_norm(config, queries, tp), layer_norm(config, keys, tp)

    def forward(self, x_BSH: paddle.Tensor, context: BatchContext, dropout: float, key: Sequence[int]) -> paddle.Tensor:
        batch, length = context.shape if self.tp.sequence_parallel_active else x_BSH.shape[:2]
        x_BSH = self.tp.copy_to_tp(x_BSH)
        by_token = [batch * length, -1, self.head_dim]
        heads = [batch, length, -1, self.head_dim]
        q, k = self.q_proj(x_BSH), self.k_proj(x_BSH)
        if self.normalises == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.reshape(by_token), k.reshape(by_token)
        rotation = None if self.rope is None else context.rotations[self.rope]
        if self.normalises == "head" and rotation is not None and paddle.in_dynamic_mode():
            q = self.q_norm(q, partial(rms_norm_rotary, tables=rotation.queries))
            k = self.k_norm(k, partial(rms_norm_rotary, tables=rotation.keys))
        else:  # programs that are recorded take one after the other
            if self.normalises == "head":
                q, k = self.q_norm(q), self.k_norm(k)
            if rotation is not None:
                q, k = apply_rotary(q, rotation.queries), apply_rotary(k, rotation.keys)
        q, k = q.reshape(heads), k.reshape(heads)
        q = q if self.query_scale == 1.0 else q * self.query_scale
        v = self.v_proj(x_BSH).reshape(heads)

        def core(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, *sinks: paddle.Tensor) -> paddle.Tensor:
            more = {"sinks_H": sinks[0]} if sinks else {}
            return context.plan.attend(q, k, v, layer=self.layer, dropout=dropout, key=key, window=self.window, **more)

        out = context.run_core_attention(core, q, k, v, *([self.sinks] if self.has_sinks else []))
        return self.o_proj(out.reshape([batch, length, -1]))


class DecoderLayer(nn.Layer):
    """Attention and MLP as residual branches, each with the norms of `Architecture.norms` before and after it.

    Hidden dropout acts on both branches just before they are added.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        randomness: Randomness,
        balance: ExpertBalance,
        *,
        moe: bool,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
        dispatcher: TokenDispatcher = LOCAL_DISPATCHER,
    ) -> None:
        super().__init__()
        self.layer, self.randomness, self.tp = layer, randomness, tp
        self.hidden_dropout, self.attention_dropout = hidden_dropout, attention_dropout
        architecture = config.architecture
        self.residual_multiplier = architecture.multipliers(config).residual

        def norm(name: str) -> nn.Layer | None:
            return layer_norm(config, config.hidden_size) if name in architecture.norms else None

        self.input_layernorm = norm(ATTENTION_INPUT_NORM)
        self.self_attn = architecture.modules().attention(config, layer, tp)
        self.attention_output_norm = norm(ATTENTION_OUTPUT_NORM)
        self.post_attention_layernorm = norm(MLP_INPUT_NORM)
        self.mlp: MoE | MLP = (
            MoE(config, layer, balance, tp, dispatcher) if moe else MLP(config, config.intermediate_size, tp)
        )
        self.mlp_output_norm = norm(MLP_OUTPUT_NORM)

    def forward(self, x_BSH: paddle.Tensor, context: BatchContext) -> paddle.Tensor:
        scale = self.randomness.dropout_scale if self.training else 0.0
        hidden_dropout = self.hidden_dropout * scale

        token_shard = (
            self.tp.rank if self.tp.sequence_parallel_active else 0
        )  # of the tokens, in what is not inside of a block
        key = self.randomness.key(self.layer, Site.ATTENTION_PROBABILITIES, self.tp.rank)
        branch = context.run_attention(self._attention, x_BSH, context, self.attention_dropout * scale, key)
        x_BSH = x_BSH + self._scaled(
            dropout(branch, hidden_dropout, self.randomness.key(self.layer, Site.ATTENTION_OUTPUT, token_shard))
        )

        branch = _normalised(self.post_attention_layernorm, x_BSH)
        branch = self.mlp(branch, context.is_token) if isinstance(self.mlp, MoE) else self.mlp(branch)
        branch = _normalised(self.mlp_output_norm, branch)
        return x_BSH + self._scaled(
            dropout(branch, hidden_dropout, self.randomness.key(self.layer, Site.MLP_OUTPUT, token_shard))
        )

    def _attention(
        self, x_BSH: paddle.Tensor, context: BatchContext, dropout: float, key: Sequence[int]
    ) -> paddle.Tensor:
        branch = self.self_attn(_normalised(self.input_layernorm, x_BSH), context, dropout, key)
        return _normalised(self.attention_output_norm, branch)

    def _scaled(self, branch_BSH: paddle.Tensor) -> paddle.Tensor:
        return branch_BSH if self.residual_multiplier == 1.0 else branch_BSH * self.residual_multiplier


def _normalised(norm: nn.Layer | None, x_BSH: paddle.Tensor) -> paddle.Tensor:
    return x_BSH if norm is None else norm(x_BSH)
