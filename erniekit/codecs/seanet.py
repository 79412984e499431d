"""SEANet (https://arxiv.org/abs/2009.02095): the convolutions of EnCodec's and Mimi's encoder and decoder.

Those of EnCodec have an LSTM among them. Names of weights are those of transformers: layers of a stack are numbered,
activations among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D
from erniekit.codecs.stack import Layer, Residual, through_in_pieces
from erniekit.codecs.weights import CodecWeights

NORM_EPSILON = 1e-5  # of PyTorch's group norm, which no key of config.json changes


@dataclass(frozen=True)
class SeanetSizes:
    """What `config.json` says of the two stacks, in its words.

    Attributes:
        norm_type: "weight_norm", which is folded into weights, or "time_group_norm".
        num_lstm_layers: 0: there is no LSTM.
    """

    audio_channels: int
    hidden_size: int
    num_filters: int
    num_residual_layers: int
    upsampling_ratios: tuple[int, ...]
    norm_type: str
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    dilation_growth_rate: int
    use_causal_conv: bool
    pad_mode: str
    compress: int
    num_lstm_layers: int
    trim_right_ratio: float
    use_conv_shortcut: bool


@dataclass(frozen=True)
class Lstm:
    """An LSTM whose states are added to its input, [1, channels, T]."""

    lstm: paddle.nn.LSTM

    def __call__(self, x: Tensor) -> Tensor:
        return next(self.in_pieces([x]))

    def in_pieces(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the result for each piece of a recording, which goes on where the one before ended."""
        state = None
        for x in pieces:
            y, state = self.lstm(x.transpose([0, 2, 1]), state)
            yield y.transpose([0, 2, 1]) + x


@dataclass(frozen=True)
class Seanet:
    """A stack: what comes before its LSTM, the LSTM, if there is one, and what comes after."""

    before: list[Layer]
    lstm: Lstm | None
    after: list[Layer]

    def in_pieces(self, pieces: Iterable[Tensor], *, down: int = 1, up: int = 1) -> Iterator[Tensor]:
        """Yield what the stack makes of a recording in pieces [1, channels, T]; see `through_in_pieces`."""
        if self.lstm is None:
            return through_in_pieces([*self.before, *self.after], pieces, down=down, up=up)
        states = self.lstm.in_pieces(through_in_pieces(self.before, pieces, down=down))
        return through_in_pieces(self.after, states, up=up)


def read_encoder(weights: CodecWeights, sizes: SeanetSizes) -> Seanet:
    """Read the encoder: sound [1, audio_channels, T] to states [1, hidden_size, frames].

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    stack = _Stack(weights, sizes, "encoder")
    channels = sizes.num_filters
    stack.convolution(sizes.audio_channels, channels, sizes.kernel_size)
    for ratio in reversed(sizes.upsampling_ratios):
        stack.residuals(channels)
        stack.activation()
        stack.convolution(channels, 2 * channels, 2 * ratio, stride=ratio)
        channels *= 2
    before, lstm = stack.layers, stack.lstm(channels)
    stack.layers = []
    stack.activation()
    stack.convolution(channels, sizes.hidden_size, sizes.last_kernel_size)
    return Seanet(before, lstm, stack.layers)


def read_decoder(weights: CodecWeights, sizes: SeanetSizes) -> Seanet:
    """Read the decoder: states [1, hidden_size, frames] to sound [1, audio_channels, frames * samples of a frame].

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    stack = _Stack(weights, sizes, "decoder")
    channels = sizes.num_filters * 2 ** len(sizes.upsampling_ratios)
    stack.convolution(sizes.hidden_size, channels, sizes.kernel_size)
    before, lstm = stack.layers, stack.lstm(channels)
    stack.layers = []
    for ratio in sizes.upsampling_ratios:
        stack.activation()
        stack.transposed(channels, channels // 2, 2 * ratio, stride=ratio)
        channels //= 2
        stack.residuals(channels)
    stack.activation()
    stack.convolution(channels, sizes.audio_channels, sizes.last_kernel_size)
    return Seanet(before, lstm, stack.layers)


def read_convolution(
    weights: CodecWeights,
    sizes: SeanetSizes,
    name: str,
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    bias: bool = True,
    mode: str | None = None,
) -> Conv1D:
    """Read a convolution that gives a frame for every `stride` samples, begun or complete.

    Args:
        mode: what is put before and after the samples. None: as `sizes.pad_mode` says.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    padding = (kernel - 1) * dilation + 1 - stride
    right = 0 if sizes.use_causal_conv else padding // 2
    return Conv1D(
        _tensor(weights, f"{name}.conv.weight", outputs, inputs, kernel),
        _tensor(weights, f"{name}.conv.bias", outputs) if bias else None,
        stride,
        dilation,
        left=padding - right,
        right=right,
        fill=True,
        mode=mode or sizes.pad_mode,
    )


def read_transposed(
    weights: CodecWeights,
    sizes: SeanetSizes,
    name: str,
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int,
    groups: int = 1,
    bias: bool = True,
) -> ConvTranspose1D:
    """Read a transposed convolution that gives `stride` samples for every frame.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    padding = kernel - stride
    right = math.ceil(padding * sizes.trim_right_ratio) if sizes.use_causal_conv else padding // 2
    return ConvTranspose1D(
        _tensor(weights, f"{name}.conv.weight", inputs, outputs // groups, kernel),
        _tensor(weights, f"{name}.conv.bias", outputs) if bias else None,
        stride,
        groups,
        left=padding - right,
        right=right,
    )


class _Stack:
    """Reads layers in their order into `layers`, and numbers them."""

    def __init__(self, weights: CodecWeights, sizes: SeanetSizes, name: str) -> None:
        self.weights, self.sizes, self.name = weights, sizes, name
        self.layers: list[Layer] = []
        self._number = 0

    def activation(self) -> None:
        self._next_name()
        self.layers.append(F.elu)

    def convolution(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> None:
        self.layers += self._convolution(self._next_name(), inputs, outputs, kernel, stride)

    def transposed(self, inputs: int, outputs: int, kernel: int, *, stride: int) -> None:
        name = self._next_name()
        layer = read_transposed(self.weights, self.sizes, name, inputs, outputs, kernel, stride=stride)
        if self.sizes.norm_type == "weight_norm":
            self.layers.append(layer)
        else:  # the norm sees what is cut off after it
            cut: Layer = lambda x: x[:, :, layer.left : x.shape[2] - layer.right]  # noqa: E731
            self.layers += [replace(layer, left=0, right=0), self._norm(name, outputs), cut]

    def residuals(self, channels: int) -> None:
        sizes, inner = self.sizes, channels // self.sizes.compress
        for number in range(sizes.num_residual_layers):
            name, dilation = self._next_name(), sizes.dilation_growth_rate**number
            first = self._convolution(f"{name}.block.1", channels, inner, sizes.residual_kernel_size, dilation=dilation)
            second = self._convolution(f"{name}.block.3", inner, channels, 1)
            shortcut = self._convolution(f"{name}.shortcut", channels, channels, 1) if sizes.use_conv_shortcut else []
            self.layers.append(Residual([F.elu, *first, F.elu, *second], shortcut))

    def lstm(self, channels: int) -> Lstm | None:
        count = self.sizes.num_lstm_layers
        if not count:
            return None
        name = self._next_name()
        zeros = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0))  # which draws no random number
        matrix, vector = (4 * channels, channels), (4 * channels,)
        kinds = (("weight_ih", matrix), ("weight_hh", matrix), ("bias_ih", vector), ("bias_hh", vector))
        values = {
            f"{kind}_l{layer}": self.weights.take(f"{name}.lstm.{kind}_l{layer}", *shape)
            for layer in range(count)
            for kind, shape in kinds
        }
        lstm = paddle.nn.LSTM(
            channels,
            channels,
            count,
            weight_ih_attr=zeros,
            weight_hh_attr=zeros,
            bias_ih_attr=zeros,
            bias_hh_attr=zeros,
        )
        for parameter, value in values.items():
            getattr(lstm, parameter).set_value(value)
        return Lstm(lstm.eval())

    def _convolution(
        self, name: str, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1
    ) -> list[Layer]:
        layer = read_convolution(
            self.weights, self.sizes, name, inputs, outputs, kernel, stride=stride, dilation=dilation
        )
        return [layer] if self.sizes.norm_type == "weight_norm" else [layer, self._norm(name, outputs)]

    def _norm(self, name: str, channels: int) -> Layer:
        """Return a norm over time and channels."""
        weight, bias = (_tensor(self.weights, f"{name}.norm.{kind}", channels) for kind in ("weight", "bias"))
        return lambda x: F.group_norm(x, 1, NORM_EPSILON, weight, bias)

    def _next_name(self) -> str:
        self._number += 1
        return f"{self.name}.layers.{self._number - 1}"


def _tensor(weights: CodecWeights, name: str, *shape: int) -> Tensor:
    return paddle.to_tensor(weights.take(name, *shape))
