"""Features of speech models: HuBERT (Hsu et al., 2021, arXiv:2106.07447) and wav2vec 2.0 (Baevski et al., 2020,
arXiv:2006.11477), which share their layers.

Shapes: S samples, T frames, C channels, H hidden size. A recording is computed alone, so nothing is padded.
Names of weights and of `config.json` are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs.attention import ACTIVATIONS, attend
from erniekit.codecs.checks import check_sound
from erniekit.codecs.config_values import check_epsilon, config_reader
from erniekit.codecs.convolutions import in_numpy
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPES = ("hubert", "wav2vec2")
CONVOLUTION_EPSILON = 1e-5  # of the norms between convolutions, which no key of config.json changes
PIECE_FRAMES = 100  # that the convolutions make at once: two seconds of published models, which stay in the caches
VARIANCE_EPSILON = 1e-7  # of the normalisation of the sound


@dataclass(frozen=True)
class SpeechModelConfig:
    """What tells one speech model from another, as `config.json` calls it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    layer_norm_eps: float
    feat_extract_norm: str
    feat_extract_activation: str
    feat_proj_layer_norm: bool
    conv_dim: tuple[int, ...]
    conv_stride: tuple[int, ...]
    conv_kernel: tuple[int, ...]
    conv_bias: bool
    num_conv_pos_embeddings: int
    num_conv_pos_embedding_groups: int
    conv_pos_batch_norm: bool
    do_stable_layer_norm: bool
    adapter_attn_dim: int  # 0: layers have no adapters

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> SpeechModelConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of a speech model.
        """
        read = config_reader(path, config)
        sizes = cls(
            hidden_size=read("hidden_size", 768),
            num_hidden_layers=read("num_hidden_layers", 12),
            num_attention_heads=read("num_attention_heads", 12),
            intermediate_size=read("intermediate_size", 3072),
            hidden_act=read("hidden_act", "gelu"),
            layer_norm_eps=read("layer_norm_eps", 1e-5),
            feat_extract_norm=read("feat_extract_norm", "group"),
            feat_extract_activation=read("feat_extract_activation", "gelu"),
            feat_proj_layer_norm=read("feat_proj_layer_norm", True),
            conv_dim=read("conv_dim", (512,) * 7),
            conv_stride=read("conv_stride", (5, 2, 2, 2, 2, 2, 2)),
            conv_kernel=read("conv_kernel", (10, 3, 3, 3, 3, 2, 2)),
            conv_bias=read("conv_bias", False),
            num_conv_pos_embeddings=read("num_conv_pos_embeddings", 128),
            num_conv_pos_embedding_groups=read("num_conv_pos_embedding_groups", 16),
            conv_pos_batch_norm=read("conv_pos_batch_norm", False),
            do_stable_layer_norm=read("do_stable_layer_norm", False),
            adapter_attn_dim=read("adapter_attn_dim", 0),
        )
        sizes._check(path)
        return sizes

    def _check(self, path: Path) -> None:
        for key in ("hidden_act", "feat_extract_activation"):
            if (name := getattr(self, key)) not in ACTIVATIONS:
                raise ModelFileError(f"{path}: {key}: {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        if self.feat_extract_norm not in ("group", "layer"):
            raise ModelFileError(f"{path}: feat_extract_norm: expected group or layer, got {self.feat_extract_norm!r}")
        if not len(self.conv_dim) == len(self.conv_stride) == len(self.conv_kernel):
            raise ModelFileError(f"{path}: conv_dim, conv_stride and conv_kernel have different lengths")
        check_epsilon(path, "layer_norm_eps", self.layer_norm_eps)
        for divisor in ("num_attention_heads", "num_conv_pos_embedding_groups"):
            if self.hidden_size % getattr(self, divisor):
                raise ModelFileError(f"{path}: hidden_size {self.hidden_size} is no multiple of {divisor}")

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return math.prod(self.conv_stride)

    def frames(self, samples: int) -> int:
        """Return how many frames so many samples give; 0 or fewer if they are too short for one."""
        for kernel, stride in zip(self.conv_kernel, self.conv_stride, strict=True):
            samples = (samples - kernel) // stride + 1
        return samples

    def receptive_field(self) -> int:
        """Return how many samples the first frame needs."""
        samples = 1
        for kernel, stride in zip(reversed(self.conv_kernel), reversed(self.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples

    def weight_shapes(self, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each weight up to a number of layers, and of the last norm; weight norm is folded."""
        H, inner, inputs = self.hidden_size, self.intermediate_size, 1
        for number, (outputs, kernel) in enumerate(zip(self.conv_dim, self.conv_kernel, strict=True)):
            path = f"feature_extractor.conv_layers.{number}"
            yield from _with_bias(f"{path}.conv", outputs, inputs, kernel, bias=self.conv_bias)
            if self.feat_extract_norm == "layer" or number == 0:
                yield from _with_bias(f"{path}.layer_norm", outputs)
            inputs = outputs
        if self.feat_proj_layer_norm:
            yield from _with_bias("feature_projection.layer_norm", inputs)
        yield from _with_bias("feature_projection.projection", H, inputs)
        path, group = "encoder.pos_conv_embed", H // self.num_conv_pos_embedding_groups
        yield from _with_bias(f"{path}.conv", H, group, self.num_conv_pos_embeddings)
        if self.conv_pos_batch_norm:
            yield from _with_bias(f"{path}.batch_norm", H)
            yield from ((f"{path}.batch_norm.running_{statistic}", (H,)) for statistic in ("mean", "var"))
        yield from _with_bias("encoder.layer_norm", H)
        for layer in range(layers):
            path = f"encoder.layers.{layer}"
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _with_bias(f"{path}.attention.{projection}", H, H)
            yield from _with_bias(f"{path}.layer_norm", H)
            yield from _with_bias(f"{path}.feed_forward.intermediate_dense", inner, H)
            yield from _with_bias(f"{path}.feed_forward.output_dense", H, inner)
            yield from _with_bias(f"{path}.final_layer_norm", H)
            if self.adapter_attn_dim and self.do_stable_layer_norm:
                yield from _with_bias(f"{path}.adapter_layer.norm", H)
                yield from _with_bias(f"{path}.adapter_layer.linear_1", self.adapter_attn_dim, H)
                yield from _with_bias(f"{path}.adapter_layer.linear_2", H, self.adapter_attn_dim)


def _with_bias(path: str, *shape: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{path}.weight", shape
    if bias:
        yield f"{path}.bias", shape[:1]


def hidden_states(config: SpeechModelConfig, weights: Mapping[str, Tensor], sound_S: Tensor) -> Iterator[Tensor]:
    """Yield float32[T, H] in the order of transformers' `hidden_states`: what enters layer 0, then what each leaves.

    Args:
        weights: by the names of `SpeechModelConfig.weight_shapes`.
        sound_S: float32, at least as many samples as the receptive field; normalised if the model wants that.
    """
    net = _Functions(weights)
    stable, eps = config.do_stable_layer_norm, config.layer_norm_eps
    x_TC = _extract_features(config, net, sound_S)
    if config.feat_proj_layer_norm:
        x_TC = net.layer_norm("feature_projection.layer_norm", x_TC, eps)
    x_TH = net.linear("feature_projection.projection", x_TC)
    x_TH = x_TH + _positions(config, net, x_TH)
    if not stable:
        x_TH = net.layer_norm("encoder.layer_norm", x_TH, eps)
    last = config.num_hidden_layers
    for layer in range(last):
        yield x_TH
        x_TH = (_stable_layer if stable else _layer)(config, net, f"encoder.layers.{layer}", x_TH)
    yield net.layer_norm("encoder.layer_norm", x_TH, eps) if stable else x_TH


def normalise(sound: np.ndarray) -> np.ndarray:
    """Return a sound with mean 0 and variance 1, as a `preprocessor_config.json` with `do_normalize` asks for."""
    return (sound - sound.mean()) / np.sqrt(sound.var() + VARIANCE_EPSILON)


class SpeechModel:
    """The hidden states of one layer of a speech model, for recordings of any length.

    Attributes:
        sampling_rate: of the sound, in Hz.
        frame_rate: frames per second.
        size: of a frame's features.
        shortest: the smallest number of samples that gives a frame.
        fingerprint: hex digest of everything that determines the features of a sound.
    """

    def __init__(self, folder: Path | str, layer: int | None = None) -> None:
        """Open a model folder of transformers; weights that the layer does not depend on are not read.

        Args:
            layer: the index into transformers' `hidden_states`: 0 is what enters the first layer, k what the k-th
                leaves. None: the last.

        Raises:
            ModelFileError: a file is missing or does not fit.
            ConfigurationError: the model has no such layer.
        """
        folder = Path(folder)
        path = folder / "config.json"
        values = read_json_object(path)
        if values.get("model_type") not in MODEL_TYPES:
            raise ModelFileError(
                f"{path}: model_type: {values.get('model_type')!r} is no speech model; known: {', '.join(MODEL_TYPES)}"
            )
        self.config = SpeechModelConfig.from_json(path, values)
        layers = self.config.num_hidden_layers
        self.layer = layers if layer is None else layer
        if not 0 <= self.layer <= layers:
            raise ConfigurationError(f"layer {layer}: {folder} has {layers} layers; choose from 0 to {layers}")
        self.sampling_rate, self._normalises = _preprocessing(folder)
        weights = CodecWeights(folder)
        prefix = f"{values['model_type']}."  # a head, such as one for CTC, puts it before the names of the model
        prefix = "" if "feature_projection.projection.weight" in weights else prefix
        shapes = self.config.weight_shapes(self.layer)
        self._weights = {name: paddle.to_tensor(weights.take(prefix + name, *shape)) for name, shape in shapes}
        facts = asdict(self.config), self.layer, self.sampling_rate, self._normalises
        self.fingerprint = weights.fingerprint(values["model_type"], *facts)
        self.frame_rate = self.sampling_rate / self.config.hop
        self.size = self.config.hidden_size
        self.shortest = self.config.receptive_field()

    def features(self, sound: np.ndarray) -> np.ndarray:
        """Return float32[frames, size] of a sound, float32[samples] of one channel from -1 to 1.

        Raises:
            DataError: the sound is too short for one frame, or its samples are no sound.
        """
        sound = check_sound(sound)
        if len(sound) < self.shortest:
            raise DataError(f"a recording of {len(sound)} samples: this speech model needs at least {self.shortest}")
        with paddle.no_grad():
            states = hidden_states(
                self.config, self._weights, paddle.to_tensor(normalise(sound) if self._normalises else sound)
            )
            for index, x_TH in enumerate(states):
                if index == self.layer:
                    return x_TH.numpy()
        raise AssertionError("a layer that the configuration has")


def _preprocessing(folder: Path) -> tuple[int, bool]:
    """Return the sampling rate and whether sound is normalised; transformers' defaults where the file is missing."""
    path = folder / "preprocessor_config.json"
    values = read_json_object(path) if path.is_file() else {}
    read = config_reader(path, values)
    return read("sampling_rate", 16_000), read("do_normalize", True)


class _Functions:
    """The layers that hold weights, by the path of their names."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    def linear(self, path: str, x: Tensor) -> Tensor:
        return paddle.matmul(x, self.weights[f"{path}.weight"], transpose_y=True) + self.weights[f"{path}.bias"]

    def layer_norm(self, path: str, x: Tensor, epsilon: float) -> Tensor:
        weight = self.weights[f"{path}.weight"]
        return F.layer_norm(x, weight.shape, weight, self.weights[f"{path}.bias"], epsilon)


def _extract_features(config: SpeechModelConfig, net: _Functions, sound_S: Tensor) -> Tensor:
    """Return the output [T, C] of the convolutions over the sound, a piece at a time: they need the most memory."""
    norm = _norm_over_time(config, net, sound_S) if config.feat_extract_norm == "group" else None
    frames, field = config.frames(sound_S.shape[0]), config.receptive_field()
    pieces = []
    for first in range(0, frames, PIECE_FRAMES):
        last = min(first + PIECE_FRAMES, frames) - 1
        pieces.append(_extract_piece(config, net, norm, sound_S[first * config.hop : last * config.hop + field]))
    return paddle.concat(pieces)


def _extract_piece(
    config: SpeechModelConfig, net: _Functions, norm: Callable[[Tensor], Tensor] | None, sound_S: Tensor
) -> Tensor:
    activation = ACTIVATIONS[config.feat_extract_activation]
    x_1CS = sound_S.reshape([1, 1, -1])
    for number in range(len(config.conv_dim)):
        x_1CS = _convolution(config, net, number, x_1CS)
        if config.feat_extract_norm == "layer":
            path = f"feature_extractor.conv_layers.{number}.layer_norm"
            x_1CS = net.layer_norm(path, x_1CS.transpose([0, 2, 1]), CONVOLUTION_EPSILON).transpose([0, 2, 1])
        elif number == 0 and norm is not None:
            x_1CS = norm(x_1CS)
        x_1CS = activation(x_1CS)
    return x_1CS[0].transpose([1, 0])


def _convolution(config: SpeechModelConfig, net: _Functions, number: int, x_1CS: Tensor) -> Tensor:
    path = f"feature_extractor.conv_layers.{number}.conv"
    bias = net.weights[f"{path}.bias"] if config.conv_bias else None
    return F.conv1d(x_1CS, net.weights[f"{path}.weight"], bias, config.conv_stride[number])


def _norm_over_time(config: SpeechModelConfig, net: _Functions, sound_S: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what normalises each channel of the first convolution over the whole recording: a group norm with as many
    groups as channels. Mean and variance of the pieces are put together as Chan et al. (1979) do it."""
    kernel, stride = config.conv_kernel[0], config.conv_stride[0]
    step = PIECE_FRAMES * config.hop // stride
    outputs = (sound_S.shape[0] - kernel) // stride + 1
    count, mean_C1, squares_C1 = 0, np.zeros(1), np.zeros(1)
    for first in range(0, outputs, step):
        last = min(first + step, outputs) - 1
        piece_S = sound_S[first * stride : last * stride + kernel]
        x_CT = _convolution(config, net, 0, piece_S.reshape([1, 1, -1]))[0].numpy()
        own_C1 = x_CT.mean(1, keepdims=True)
        rest_CT = x_CT - own_C1
        deviation_C1, total = own_C1 - mean_C1, count + x_CT.shape[1]
        squares_C1 = squares_C1 + np.einsum("ct,ct->c", rest_CT, rest_CT)[:, None]
        squares_C1 = squares_C1 + deviation_C1**2 * (count * x_CT.shape[1] / total)
        mean_C1 = mean_C1 + deviation_C1 * (x_CT.shape[1] / total)
        count = total
    path = "feature_extractor.conv_layers.0.layer_norm"
    weight_C1, bias_C1 = (net.weights[f"{path}.{name}"].unsqueeze(1) for name in ("weight", "bias"))
    scale_C1 = (1 / np.sqrt(squares_C1 / count + CONVOLUTION_EPSILON)).astype(np.float32)
    mean, scale = paddle.to_tensor(mean_C1.astype(np.float32)), paddle.to_tensor(scale_C1) * weight_C1
    return lambda x_1CT: _scaled(x_1CT, mean, scale, bias_C1)


def _scaled(x_1CT: Tensor, mean_C1: Tensor, scale_C1: Tensor, bias_C1: Tensor) -> Tensor:
    """Return (x - mean) * scale + bias; NumPy is faster at that on a CPU."""

    def compute(x: np.ndarray, mean: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
        y = x - mean
        y *= scale
        y += bias
        return y

    if not x_1CT.place.is_cpu_place():
        return (x_1CT - mean_C1) * scale_C1 + bias_C1
    return in_numpy(compute, x_1CT, mean_C1, scale_C1, bias_C1)


def _positions(config: SpeechModelConfig, net: _Functions, x_TH: Tensor) -> Tensor:
    """Return relative positions [T, H]: a wide convolution over the frames around each."""
    path, kernel = "encoder.pos_conv_embed", config.num_conv_pos_embeddings
    if config.conv_pos_batch_norm:
        mean, variance, weight, bias = (
            net.weights[f"{path}.batch_norm.{name}"] for name in ("running_mean", "running_var", "weight", "bias")
        )
        x_TH = (x_TH - mean) * ((variance + CONVOLUTION_EPSILON).rsqrt() * weight) + bias
    weight, bias = net.weights[f"{path}.conv.weight"], net.weights[f"{path}.conv.bias"]
    x_1HT = x_TH.transpose([1, 0]).unsqueeze(0)
    y_1HT = F.conv1d(x_1HT, weight, bias, padding=kernel // 2, groups=config.num_conv_pos_embedding_groups)
    y_TH = y_1HT[0].transpose([1, 0])[: x_TH.shape[0]]  # an even kernel gives one frame more
    return ACTIVATIONS[config.feat_extract_activation](y_TH)


def _attention(config: SpeechModelConfig, net: _Functions, path: str, x_TH: Tensor) -> Tensor:
    heads = [x_TH.shape[0], config.num_attention_heads, -1]
    q, k, v = (net.linear(f"{path}.attention.{name}_proj", x_TH).reshape(heads) for name in "qkv")
    return net.linear(f"{path}.attention.out_proj", attend(q, k, v))


def _feed_forward(config: SpeechModelConfig, net: _Functions, path: str, x_TH: Tensor) -> Tensor:
    inner = ACTIVATIONS[config.hidden_act](net.linear(f"{path}.feed_forward.intermediate_dense", x_TH))
    return net.linear(f"{path}.feed_forward.output_dense", inner)


def _layer(config: SpeechModelConfig, net: _Functions, path: str, x_TH: Tensor) -> Tensor:
    """Attention and an MLP, each followed by a norm, as base models have them."""
    eps = config.layer_norm_eps
    x_TH = net.layer_norm(f"{path}.layer_norm", x_TH + _attention(config, net, path, x_TH), eps)
    return net.layer_norm(f"{path}.final_layer_norm", x_TH + _feed_forward(config, net, path, x_TH), eps)


def _stable_layer(config: SpeechModelConfig, net: _Functions, path: str, x_TH: Tensor) -> Tensor:
    """Attention and an MLP, each behind a norm, as large models have them; and the adapter of a language (MMS)."""
    eps = config.layer_norm_eps
    x_TH = x_TH + _attention(config, net, path, net.layer_norm(f"{path}.layer_norm", x_TH, eps))
    x_TH = x_TH + _feed_forward(config, net, path, net.layer_norm(f"{path}.final_layer_norm", x_TH, eps))
    if not config.adapter_attn_dim:
        return x_TH
    inner = net.linear(f"{path}.adapter_layer.linear_1", net.layer_norm(f"{path}.adapter_layer.norm", x_TH, 1e-5))
    return x_TH + net.linear(f"{path}.adapter_layer.linear_2", F.relu(inner))
