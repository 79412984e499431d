"""The transformers of Mimi, one behind its encoder and one before its decoder.

A frame attends to the last `sliding_window` ones, as the model was trained and as transformers 5 computes it;
transformers 4 attends to all before it, so that its codes are others after ten seconds. Names of weights and of
`config.json` are those of transformers. Shapes: T frames, H size of a state, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs.attention import ACTIVATIONS, attend
from erniekit.codecs.config_values import check_epsilon, config_reader
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import ModelFileError


@dataclass(frozen=True)
class TransformerSizes:
    """What `config.json` says of both transformers, in its words."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    rope_theta: float
    sliding_window: int
    attention_bias: bool

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any], hidden_size: int) -> TransformerSizes:
        """Read the sizes; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: values are of a wrong type, do not fit each other, or are not supported.
        """
        rope = config.get("rope_parameters")  # where transformers 5 puts the rotary positions
        rope = rope if isinstance(rope, dict) else {}
        if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ModelFileError(f"{path}: scaled rotary positions are not supported")
        read = config_reader(path, {"rope_theta": rope.get("rope_theta"), **config})
        heads = read("num_attention_heads", 8)
        sizes = cls(
            hidden_size,
            num_hidden_layers=read("num_hidden_layers", 8),
            intermediate_size=read("intermediate_size", 2048),
            num_attention_heads=heads,
            num_key_value_heads=read("num_key_value_heads", 8),
            head_dim=read("head_dim", max(1, hidden_size // heads)),
            hidden_act=read("hidden_act", "gelu"),
            norm_eps=read("norm_eps", 1e-5),
            rope_theta=read("rope_theta", 10_000.0),
            sliding_window=read("sliding_window", 250),
            attention_bias=read("attention_bias", False),
        )
        if sizes.hidden_act not in ACTIVATIONS:
            raise ModelFileError(
                f"{path}: hidden_act: {sizes.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if sizes.num_attention_heads % sizes.num_key_value_heads or sizes.head_dim % 2:
            raise ModelFileError(f"{path}: num_key_value_heads must divide num_attention_heads, and 2 head_dim")
        check_epsilon(path, "norm_eps", sizes.norm_eps)
        return sizes


@dataclass(frozen=True)
class Transformer:
    """A transformer over states [1, H, T]; `layers` hold the weights of each by name."""

    sizes: TransformerSizes
    layers: Sequence[Mapping[str, Tensor]]

    def __call__(self, x_1HT: Tensor) -> Tensor:
        x_TH = x_1HT[0].transpose([1, 0])
        rotation = _rotation(x_TH.shape[0], self.sizes.head_dim, self.sizes.rope_theta)
        for tensors in self.layers:
            x_TH = _layer(self.sizes, tensors, x_TH, rotation)
        return x_TH.transpose([1, 0]).unsqueeze(0)


def read_transformer(weights: CodecWeights, path: str, sizes: TransformerSizes) -> Transformer:
    """Read a transformer, whose weights' names begin with `path`.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    H, inner = sizes.hidden_size, sizes.intermediate_size
    queries, keys = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, H),
        "self_attn.k_proj.weight": (keys, H),
        "self_attn.v_proj.weight": (keys, H),
        "self_attn.o_proj.weight": (H, queries),
        "mlp.fc1.weight": (inner, H),
        "mlp.fc2.weight": (H, inner),
        "input_layernorm.weight": (H,),
        "post_attention_layernorm.weight": (H,),
    }
    biased = [name for name in shapes if "norm" in name or ("attn" in name and sizes.attention_bias)]
    shapes |= {f"{name.removesuffix('weight')}bias": shapes[name][:1] for name in biased}
    shapes |= {f"{name}_layer_scale.scale": (H,) for name in ("self_attn", "mlp")}
    layers = []
    for number in range(sizes.num_hidden_layers):
        at = f"{path}.layers.{number}"
        layers.append({name: paddle.to_tensor(weights.take(f"{at}.{name}", *shape)) for name, shape in shapes.items()})
    return Transformer(sizes, layers)


def _layer(
    sizes: TransformerSizes, tensors: Mapping[str, Tensor], x_TH: Tensor, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """Return states after attention and an MLP, each behind a norm, its result scaled by a learned vector."""

    def linear(path: str, x: Tensor) -> Tensor:
        y = paddle.matmul(x, tensors[f"{path}.weight"], transpose_y=True)
        bias = tensors.get(f"{path}.bias")
        return y if bias is None else y + bias

    def norm(path: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], tensors[f"{path}.weight"], tensors[f"{path}.bias"], sizes.norm_eps)

    heads = [x_TH.shape[0], -1, sizes.head_dim]
    seen_TH = norm("input_layernorm", x_TH)
    q, k, v = (linear(f"self_attn.{name}_proj", seen_TH).reshape(heads) for name in "qkv")
    mixed = attend(_rotated(q, rotation), _rotated(k, rotation), v, window=sizes.sliding_window)
    x_TH = x_TH + linear("self_attn.o_proj", mixed) * tensors["self_attn_layer_scale.scale"]
    inner = ACTIVATIONS[sizes.hidden_act](linear("mlp.fc1", norm("post_attention_layernorm", x_TH)))
    return x_TH + linear("mlp.fc2", inner) * tensors["mlp_layer_scale.scale"]


def _rotation(frames: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each [T, 1, D / 2], of the rotary positions (Su et al., 2021, arXiv:2104.09864)."""
    frequencies = (theta ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = np.arange(frames, dtype=np.float32)[:, None, None] * frequencies
    return paddle.to_tensor(np.cos(angles)), paddle.to_tensor(np.sin(angles))


def _rotated(x_TND: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + D / 2) of each head by the angles of its frame."""
    cosine, sine = rotation
    first, second = x_TND.chunk(2, -1)
    return paddle.concat([first * cosine - second * sine, second * cosine + first * sine], -1)
