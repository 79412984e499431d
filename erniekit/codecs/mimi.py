"""Mimi (Défossez et al., 2024, arXiv:2410.00037): convolutions, transformers and two residual quantizers at 12.5 Hz.

Level 0 is semantic, learned from a speech model, and the others are acoustic; both quantize the same states. Sound and
states are [1, channels, time]; a transformer's are [T, H]. Names of weights and of `config.json` are those of
transformers. A frame attends to the last `sliding_window` ones, as the model was trained and as transformers 5
computes it; transformers 4 attends to all before it, so that its codes are others after ten seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs.attention import ACTIVATIONS, attend
from erniekit.codecs.checks import check_codes, check_levels, check_sound
from erniekit.codecs.codebooks import dequantize, quantize
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D
from erniekit.codecs.stack import PIECE_SECONDS, Layer, Residual, pieces_of, through_in_pieces
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPE = "mimi"
_UNUSED = r"quantizer\..*"  # levels that are not used, and what is left of training
USAGE_EPSILON = 1e-5  # the least that the sum of an entry's vectors is divided by
SEMANTIC, ACOUSTIC = (f"quantizer.{kind}_residual_vector_quantizer" for kind in ("semantic", "acoustic"))


@dataclass(frozen=True)
class MimiConfig:
    """What tells one Mimi from another, as `config.json` calls it."""

    sampling_rate: int
    frame_rate: float
    hidden_size: int
    num_filters: int
    num_residual_layers: int
    upsampling_ratios: tuple[int, ...]
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    dilation_growth_rate: int
    use_causal_conv: bool
    pad_mode: str
    compress: int
    trim_right_ratio: float
    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    use_conv_shortcut: bool
    vector_quantization_hidden_dimension: int
    num_semantic_quantizers: int
    upsample_groups: int
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
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> MimiConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of a Mimi.
        """
        rope = config.get("rope_parameters")  # where transformers 5 puts the rotary positions
        rope = rope if isinstance(rope, dict) else {}
        if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
            raise ModelFileError(f"{path}: scaled rotary positions are not supported")
        read = config_reader(path, {"rope_theta": rope.get("rope_theta"), **config})
        if read("audio_channels", 1) != 1:
            raise ModelFileError(f"{path}: audio_channels: codecs of one channel are supported")
        sampling_rate = read("sampling_rate", 24_000)
        ratios = read("upsampling_ratios", (8, 6, 5, 4))
        hidden, heads = read("hidden_size", 512), read("num_attention_heads", 8)
        sizes = cls(
            sampling_rate=sampling_rate,
            frame_rate=read("frame_rate", sampling_rate / (2 * math.prod(ratios))),
            hidden_size=hidden,
            num_filters=read("num_filters", 64),
            num_residual_layers=read("num_residual_layers", 1),
            upsampling_ratios=ratios,
            kernel_size=read("kernel_size", 7),
            last_kernel_size=read("last_kernel_size", 3),
            residual_kernel_size=read("residual_kernel_size", 3),
            dilation_growth_rate=read("dilation_growth_rate", 2),
            use_causal_conv=read("use_causal_conv", True),
            pad_mode=read("pad_mode", "constant"),
            compress=read("compress", 2),
            trim_right_ratio=read("trim_right_ratio", 1.0),
            codebook_size=read("codebook_size", 2048),
            codebook_dim=read("codebook_dim", 256),
            num_quantizers=read("num_quantizers", 32),
            use_conv_shortcut=read("use_conv_shortcut", False),
            vector_quantization_hidden_dimension=read("vector_quantization_hidden_dimension", 256),
            num_semantic_quantizers=read("num_semantic_quantizers", 1),
            upsample_groups=read("upsample_groups", 512),
            num_hidden_layers=read("num_hidden_layers", 8),
            intermediate_size=read("intermediate_size", 2048),
            num_attention_heads=heads,
            num_key_value_heads=read("num_key_value_heads", 8),
            head_dim=read("head_dim", max(1, hidden // heads)),
            hidden_act=read("hidden_act", "gelu"),
            norm_eps=read("norm_eps", 1e-5),
            rope_theta=read("rope_theta", 10_000.0),
            sliding_window=read("sliding_window", 250),
            attention_bias=read("attention_bias", False),
        )
        sizes._check(path)
        return sizes

    def _check(self, path: Path) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise ModelFileError(
                f"{path}: hidden_act: {self.hidden_act!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        if self.pad_mode not in ("constant", "reflect", "replicate"):
            raise ModelFileError(f"{path}: pad_mode: {self.pad_mode!r} is none of constant, reflect, replicate")
        if self.num_semantic_quantizers >= self.num_quantizers:
            raise ModelFileError(f"{path}: num_semantic_quantizers must be less than num_quantizers")
        if self.codebook_dim != self.vector_quantization_hidden_dimension:
            raise ModelFileError(f"{path}: codebook_dim and vector_quantization_hidden_dimension differ")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ModelFileError(f"{path}: num_key_value_heads must divide num_attention_heads, and 2 head_dim")
        if self.hidden_size % self.upsample_groups:
            raise ModelFileError(f"{path}: upsample_groups must divide hidden_size")
        inner_rate = math.ceil(self.sampling_rate / math.prod(self.upsampling_ratios))
        if int(inner_rate / self.frame_rate) != 2:
            raise ModelFileError(f"{path}: frame_rate: {self.frame_rate} is not half of {inner_rate}")


class Mimi:
    """A Mimi as a codec; see `erniekit.codecs.codec.Codec`. Code [0] is the semantic level.

    A recording of S samples has ceil(S / samples of a frame) frames, and these decode to whole frames of sound.
    """

    can_decode = True

    def __init__(self, folder: Path | str, *, levels: int | None = None) -> None:
        """Open a model folder of transformers.

        Args:
            levels: use so many codebooks, from the coarsest. None: all.

        Raises:
            ModelFileError: a file is missing or does not fit.
            ConfigurationError: the codec has fewer levels.
        """
        folder = Path(folder)
        path = folder / "config.json"
        config = MimiConfig.from_json(path, read_json_object(path))
        self.levels = check_levels(levels, config.num_quantizers, folder)
        self.sampling_rate, self.frame_rate = config.sampling_rate, config.frame_rate
        self.codebook_size = config.codebook_size
        self._hop = math.prod(config.upsampling_ratios)  # samples of a frame of the transformers
        self._piece = max(1, PIECE_SECONDS * config.sampling_rate // self._hop)  # of these frames
        parts = _Parts(config, CodecWeights(folder))
        self._encoder = parts.encoder()
        self._encoder_transformer = parts.transformer("encoder_transformer")
        self._downsample = parts.resample("downsample")
        semantic = min(self.levels, config.num_semantic_quantizers)
        self._quantizers = [parts.quantizer(SEMANTIC, semantic)]
        if self.levels > semantic:
            self._quantizers.append(parts.quantizer(ACOUSTIC, self.levels - semantic))
        self._upsample = parts.resample("upsample")
        self._decoder_transformer = parts.transformer("decoder_transformer")
        self._decoder = parts.decoder()
        parts.weights.refuse_others(_UNUSED)
        facts = [asdict(config), self.levels, parts.weights.digest]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of float32[samples].

        Raises:
            DataError: there are no samples, or they are no sound.
        """
        sound = check_sound(sound)
        if not len(sound):
            raise DataError("a recording without samples has no codes")
        with paddle.no_grad():
            pieces = pieces_of(sound[None], self._piece * self._hop)
            x_1CT = paddle.concat(list(through_in_pieces(self._encoder, pieces, down=self._hop)), 2)
            x_1CT = self._downsample(_over_time(self._encoder_transformer, x_1CT))
            codes = [quantizer.encode(x_1CT) for quantizer in self._quantizers]
        return paddle.concat(codes).numpy().astype(np.int32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels or fewer, frames].

        Raises:
            DataError: a code is out of range, their shape is wrong, or there are no frames.
        """
        codes = check_codes(codes, self)
        if not codes.shape[1]:
            raise DataError("codes without frames have no sound")
        with paddle.no_grad():
            first = self._quantizers[0]
            x_1CT = first.decode(paddle.to_tensor(codes[: first.levels]))
            if len(codes) > first.levels:
                x_1CT = x_1CT + self._quantizers[1].decode(paddle.to_tensor(codes[first.levels :]))
            x_1CT = _over_time(self._decoder_transformer, self._upsample(x_1CT))
            states = (x_1CT[:, :, start : start + self._piece] for start in range(0, x_1CT.shape[2], self._piece))
            pieces = through_in_pieces(self._decoder, states, up=self._hop)
            return np.concatenate([piece.numpy()[0, 0] for piece in pieces])


@dataclass(frozen=True)
class _Quantizer:
    """A residual quantizer between two projections, each [out, in], or None where sizes are equal."""

    project_in: Tensor | None
    codebooks: Sequence[Tensor]
    project_out: Tensor | None

    @property
    def levels(self) -> int:
        return len(self.codebooks)

    def encode(self, x_1CT: Tensor) -> Tensor:
        """Return int64[levels, T]."""
        x_TC = x_1CT[0].transpose([1, 0])
        return quantize(_projected(x_TC, self.project_in), self.codebooks)

    def decode(self, codes_LT: Tensor) -> Tensor:
        """Return [1, C, T] of as many levels as there are codes."""
        x_TC = _projected(dequantize(codes_LT, self.codebooks), self.project_out)
        return x_TC.transpose([1, 0]).unsqueeze(0)


def _projected(x_TC: Tensor, weight: Tensor | None) -> Tensor:
    return x_TC if weight is None else paddle.matmul(x_TC, weight, transpose_y=True)


@dataclass(frozen=True)
class _Parts:
    """Put the parts of the codec together from its weights."""

    config: MimiConfig
    weights: CodecWeights

    def encoder(self) -> list[Layer]:
        """Sound to states at twice the frame rate."""
        config = self.config
        channels = config.num_filters
        steps = [self.convolution("encoder.layers.0", 1, channels, config.kernel_size)]
        for ratio in reversed(config.upsampling_ratios):
            steps += [self.residual(f"encoder.layers.{len(steps) + n}", channels, n)
                      for n in range(config.num_residual_layers)]  # fmt: skip
            steps.append(F.elu)
            path = f"encoder.layers.{len(steps)}"
            steps.append(self.convolution(path, channels, 2 * channels, 2 * ratio, stride=ratio))
            channels *= 2
        steps.append(F.elu)
        path = f"encoder.layers.{len(steps)}"
        return [*steps, self.convolution(path, channels, config.hidden_size, config.last_kernel_size)]

    def decoder(self) -> list[Layer]:
        """States at twice the frame rate to sound."""
        config = self.config
        channels = config.num_filters * 2 ** len(config.upsampling_ratios)
        steps = [self.convolution("decoder.layers.0", config.hidden_size, channels, config.kernel_size)]
        for ratio in config.upsampling_ratios:
            steps.append(F.elu)
            path = f"decoder.layers.{len(steps)}"
            steps.append(self.transposed(path, channels, channels // 2, 2 * ratio, stride=ratio))
            channels //= 2
            steps += [self.residual(f"decoder.layers.{len(steps) + n}", channels, n)
                      for n in range(config.num_residual_layers)]  # fmt: skip
        steps.append(F.elu)
        path = f"decoder.layers.{len(steps)}"
        return [*steps, self.convolution(path, channels, 1, config.last_kernel_size)]

    def residual(self, path: str, channels: int, number: int) -> Layer:
        config, inner = self.config, channels // self.config.compress
        dilation = config.dilation_growth_rate**number
        first = self.convolution(f"{path}.block.1", channels, inner, config.residual_kernel_size, dilation=dilation)
        second = self.convolution(f"{path}.block.3", inner, channels, 1)
        shortcut = [self.convolution(f"{path}.shortcut", channels, channels, 1)] if config.use_conv_shortcut else []
        return Residual((F.elu, first, F.elu, second), shortcut)

    def resample(self, path: str) -> Layer:
        """Halve the rate of states, or double it."""
        size = self.config.hidden_size
        if path == "upsample":
            return self.transposed(path, size, size, 4, stride=2, groups=self.config.upsample_groups, bias=False)
        return self.convolution(path, size, size, 4, stride=2, bias=False, mode="replicate")

    def convolution(
        self,
        path: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        mode: str | None = None,
    ) -> Layer:
        padding = (kernel - 1) * dilation + 1 - stride
        right = 0 if self.config.use_causal_conv else padding // 2
        return Conv1D(
            self.tensor(f"{path}.conv.weight", outputs, inputs, kernel),
            self.tensor(f"{path}.conv.bias", outputs) if bias else None,
            stride,
            dilation,
            left=padding - right,
            right=right,
            fill=True,
            mode=mode or self.config.pad_mode,
        )

    def transposed(
        self, path: str, inputs: int, outputs: int, kernel: int, *, stride: int, groups: int = 1, bias: bool = True
    ) -> Layer:
        padding = kernel - stride
        causal = self.config.use_causal_conv
        right = math.ceil(padding * self.config.trim_right_ratio) if causal else padding // 2
        return ConvTranspose1D(
            self.tensor(f"{path}.conv.weight", inputs, outputs // groups, kernel),
            self.tensor(f"{path}.conv.bias", outputs) if bias else None,
            stride,
            groups,
            left=padding - right,
            right=right,
        )

    def quantizer(self, path: str, levels: int) -> _Quantizer:
        config = self.config
        inner, size = config.vector_quantization_hidden_dimension, config.hidden_size
        project_in = project_out = None
        if inner != size:
            project_in = self.tensor(f"{path}.input_proj.weight", inner, size, 1).squeeze(2)
            project_out = self.tensor(f"{path}.output_proj.weight", size, inner, 1).squeeze(2)
        codebooks = [self.codebook(f"{path}.layers.{level}.codebook") for level in range(levels)]
        return _Quantizer(project_in, codebooks, project_out)

    def codebook(self, path: str) -> Tensor:
        """Return the mean of the vectors that each entry stood for, of which files hold the sum and the count."""
        K, D = self.config.codebook_size, self.config.codebook_dim
        usage_K = self.weights.take(f"{path}.cluster_usage", K)
        sums_KD = self.weights.take(f"{path}.embed_sum", K, D)
        return paddle.to_tensor(sums_KD / np.maximum(usage_K, np.float32(USAGE_EPSILON))[:, None])

    def transformer(self, path: str) -> list[_TransformerLayer]:
        config = self.config
        H, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_attention_heads * D, config.num_key_value_heads * D
        layers = []
        for number in range(config.num_hidden_layers):
            at = f"{path}.layers.{number}"
            shapes = {
                "self_attn.q_proj": (queries, H),
                "self_attn.k_proj": (keys, H),
                "self_attn.v_proj": (keys, H),
                "self_attn.o_proj": (H, queries),
                "mlp.fc1": (inner, H),
                "mlp.fc2": (H, inner),
                "input_layernorm": (H,),
                "post_attention_layernorm": (H,),
            }
            tensors = {name: self.tensor(f"{at}.{name}.weight", *shape) for name, shape in shapes.items()}
            for name, shape in shapes.items():
                if name.endswith("norm") or (name.startswith("self_attn") and config.attention_bias):
                    tensors[f"{name}.bias"] = self.tensor(f"{at}.{name}.bias", shape[0])
            for name in ("self_attn", "mlp"):
                tensors[f"{name}_layer_scale"] = self.tensor(f"{at}.{name}_layer_scale.scale", H)
            layers.append(_TransformerLayer(config, tensors))
        return layers

    def tensor(self, name: str, *shape: int) -> Tensor:
        return paddle.to_tensor(self.weights.take(name, *shape))


@dataclass(frozen=True)
class _TransformerLayer:
    """Attention with rotary positions and an MLP, each behind a norm, its result scaled by a learned vector."""

    config: MimiConfig
    tensors: Mapping[str, Tensor]

    def __call__(self, x_TH: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x_TH = (
            x_TH
            + self._attention(self._norm("input_layernorm", x_TH), rotation) * self.tensors["self_attn_layer_scale"]
        )
        inner = ACTIVATIONS[self.config.hidden_act](
            self._linear("mlp.fc1", self._norm("post_attention_layernorm", x_TH))
        )
        return x_TH + self._linear("mlp.fc2", inner) * self.tensors["mlp_layer_scale"]

    def _attention(self, x_TH: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = [x_TH.shape[0], -1, self.config.head_dim]
        q, k, v = (self._linear(f"self_attn.{name}_proj", x_TH).reshape(heads) for name in "qkv")
        mixed = attend(_rotated(q, rotation), _rotated(k, rotation), v, window=self.config.sliding_window)
        return self._linear("self_attn.o_proj", mixed)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = paddle.matmul(x, self.tensors[name], transpose_y=True)
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[name], self.tensors[f"{name}.bias"], self.config.norm_eps)


def _over_time(layers: Sequence[_TransformerLayer], x_1HT: Tensor) -> Tensor:
    """Apply a transformer to states [1, H, T]."""
    x_TH = x_1HT[0].transpose([1, 0])
    config = layers[0].config
    rotation = _rotation(x_TH.shape[0], config.head_dim, config.rope_theta)
    for layer in layers:
        x_TH = layer(x_TH, rotation)
    return x_TH.transpose([1, 0]).unsqueeze(0)


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
