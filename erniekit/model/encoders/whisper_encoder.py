"""Whisper's audio encoder (Radford et al., 2022, arXiv:2212.04356), as Voxtral and Qwen2-Audio have it.

Shapes: A windows of recordings, M mel bins, T frames, S = T / 2 states of a window, H channels, N heads, D head size.
Parameter names are those of `audio_tower` in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.architectures.audio_encoder import FRAMES_PER_STATE, KERNEL, AudioEncoderSizes
from erniekit.model.attention import AttentionPlan
from erniekit.model.cpu_gradients import LayerNorm, add_bias, gelu
from erniekit.model.device import has_flashmask_kernel
from erniekit.model.encoders.window_attention import WindowAttention
from erniekit.model.linear import ZEROS, Linear
from erniekit.model.recompute import Recompute
from erniekit.model.tensor_parallel import TensorParallel

EPSILON = 1e-5  # of all layer norms


class WhisperEncoder(nn.Layer):
    """Log-mel spectrograms [A, M, T] -> states [A, S, H], or means of `pooled` states in a row.

    Two convolutions, of which the second halves the number of frames, fixed positions, layers, a norm. Within a window
    every state attends to all others, or, with `states_of_frames`, to those of the frames with sound. The ranks of `tp`
    divide the heads and the channels of MLPs, and each has all states.

    Args:
        pooled: how many states in a row become their mean before the last norm.
        states_of_frames: the number of states of so many frames of sound, beyond which nothing is attended to. Those
            that no window of a batch has are not computed, and are zeros in what is returned.
    """

    def __init__(
        self,
        sizes: AudioEncoderSizes,
        tp: TensorParallel,
        *,
        pooled: int = 1,
        states_of_frames: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__()
        self.pooled, self.states_of_frames = pooled, states_of_frames
        hidden = sizes.hidden_size
        self.conv1 = Convolution(sizes.num_mel_bins, hidden, stride=1)
        self.conv2 = Convolution(hidden, hidden, stride=FRAMES_PER_STATE)
        self.embed_positions = Positions(sizes.max_source_positions, hidden)
        tp = replace(tp, sequence_parallel=False)  # all states are on every rank
        self.layers = nn.LayerList(WhisperEncoderLayer(sizes, tp) for _ in range(sizes.num_hidden_layers))
        self.layer_norm = LayerNorm(hidden, EPSILON)

    def forward(
        self, features_AMT: paddle.Tensor, frames_A: paddle.Tensor, recompute: Recompute | None = None
    ) -> paddle.Tensor:
        """Encode windows.

        Args:
            features_AMT: float32.
            frames_A: int32, the frames of each window that are sound; the others are its padding.
            recompute: in training, layers keep only their input and compute the rest again in backward.
        """
        all_states = features_AMT.shape[2] // FRAMES_PER_STATE
        heard = self._heard_states(frames_A, all_states)
        features_AMT = features_AMT[:, :, : heard * FRAMES_PER_STATE + KERNEL - 1]  # all that these states depend on
        x_ATH = gelu(self.conv1(features_AMT.astype(self.conv1.weight.dtype)))
        x_ASH = gelu(self.conv2(x_ATH.transpose([0, 2, 1])))[:, :heard]
        x_ASH = self.embed_positions(x_ASH)
        plan = self._attention_plan(frames_A, x_ASH.shape[1])
        for layer in self.layers:
            x_ASH = layer(x_ASH, plan) if recompute is None else recompute.whole_layer(layer, x_ASH, plan)
        if self.pooled > 1:
            windows, states, channels = x_ASH.shape
            whole = states // self.pooled
            x_ASH = x_ASH[:, : whole * self.pooled].reshape([windows, whole, self.pooled, channels]).mean(2)
        x_ASH = self.layer_norm(x_ASH)
        left_out = all_states // self.pooled - x_ASH.shape[1]
        return F.pad(x_ASH, [0, left_out], data_format="NLC") if left_out else x_ASH

    def _heard_states(self, frames_A: paddle.Tensor, states: int) -> int:
        """Return how many states of the windows are computed: where nothing attends to those of silence, as many as the
        longest sound of the batch has."""
        if self.states_of_frames is None:
            return states
        return max(self.pooled, self.states_of_frames(int(frames_A.max())))

    def _attention_plan(self, frames_A: paddle.Tensor, states: int) -> AttentionPlan | WindowAttention:
        """Let all queries of a window see the keys of its sound."""
        windows = frames_A.shape[0]
        seen = [states] * windows
        if self.states_of_frames is not None:
            seen = [self.states_of_frames(frames) for frames in frames_A.numpy().tolist()]
        if not has_flashmask_kernel():
            return WindowAttention(tuple(seen))
        # FlashMask's rows [start, S) and [0, end) are hidden from a key, which is all of them for a key of the padding.
        indices_A1S2 = np.zeros((windows, 1, states, 2), np.int32)
        for window, count in enumerate(seen):
            indices_A1S2[window, :, :count, 0] = states
        return AttentionPlan.build(indices_A1S2, causal=False)


class Convolution(nn.Conv1D):
    """Columns [A, M, T] -> rows of states [A, T / stride, H], to which a bias is added in less time than to columns."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        zeros = paddle.ParamAttr(initializer=ZEROS)
        super().__init__(inputs, outputs, KERNEL, stride=stride, padding=1, weight_attr=zeros, bias_attr=zeros)

    def forward(self, x_AMT: paddle.Tensor) -> paddle.Tensor:
        x_AHT = F.conv1d(x_AMT, self.weight, stride=self._stride, padding=self._padding)
        return add_bias(x_AHT.transpose([0, 2, 1]), self.bias)


class Positions(nn.Layer):
    """States [A, S, H] plus an embedding of each position, which files hold and no gradient changes."""

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([length, hidden], default_initializer=ZEROS)
        self.weight.stop_gradient = True

    def forward(self, x_ASH: paddle.Tensor) -> paddle.Tensor:
        return x_ASH + self.weight[: x_ASH.shape[1]].astype(x_ASH.dtype)


class WhisperEncoderLayer(nn.Layer):
    """Attention and an MLP with GELU as residual branches, each behind a layer norm."""

    def __init__(self, sizes: AudioEncoderSizes, tp: TensorParallel) -> None:
        super().__init__()
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        self.tp = tp
        self.self_attn_layer_norm = LayerNorm(hidden, EPSILON)
        self.self_attn = WhisperAttention(hidden, sizes.num_attention_heads, tp)
        self.final_layer_norm = LayerNorm(hidden, EPSILON)
        self.fc1 = Linear(hidden, inner, bias=True, tp=tp, shard_along="outputs")
        self.fc2 = Linear(inner, hidden, bias=True, tp=tp, shard_along="inputs")

    def forward(self, x_ASH: paddle.Tensor, plan: AttentionPlan | WindowAttention) -> paddle.Tensor:
        x_ASH = x_ASH + self.self_attn(self.self_attn_layer_norm(x_ASH), plan)
        inner = self.fc1(self.tp.copy_to_tp(self.final_layer_norm(x_ASH)))
        return x_ASH + self.fc2(gelu(inner))


class WhisperAttention(nn.Layer):
    """Attention in both directions; keys have no bias."""

    def __init__(self, hidden: int, heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim, self.tp = hidden // heads, tp
        self.q_proj = Linear(hidden, hidden, bias=True, tp=tp, shard_along="outputs")
        self.k_proj = Linear(hidden, hidden, tp=tp, shard_along="outputs")
        self.v_proj = Linear(hidden, hidden, bias=True, tp=tp, shard_along="outputs")
        self.out_proj = Linear(hidden, hidden, bias=True, tp=tp, shard_along="inputs")

    def forward(self, x_ASH: paddle.Tensor, plan: AttentionPlan | WindowAttention) -> paddle.Tensor:
        x_ASH = self.tp.copy_to_tp(x_ASH)
        windows, states = x_ASH.shape[:2]
        heads = [windows, states, -1, self.head_dim]
        q, k, v = (linear(x_ASH).reshape(heads) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(plan.attend(q, k, v).reshape([windows, states, -1]))
