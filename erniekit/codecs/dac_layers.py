"""The convolutions of DAC's encoder and decoder (Kumar et al., 2023, arXiv:2306.06546), with names of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import paddle
from paddle import Tensor

from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D, snake
from erniekit.codecs.stack import Layer, Residual
from erniekit.codecs.weights import CodecWeights

DILATIONS = (1, 3, 9)  # of the residual units of a block


def read_encoder(weights: CodecWeights, path: str, channels: int, ratios: tuple[int, ...], size: int) -> list[Layer]:
    """Read the encoder: sound [1, 1, T] to states [1, size, frames].

    Args:
        path: what stands before the names of its weights.
        channels: of the first convolution; each block doubles them.
        ratios: of the blocks, by which each divides the rate.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    read = _Reader(weights, path)
    layers: list[Layer] = [read.convolution("conv1", 1, channels, 7)]
    for number, ratio in enumerate(ratios):
        block = f"block.{number}"
        layers += [read.residual(f"{block}.res_unit{n}", channels, dilation) for n, dilation in enumerate(DILATIONS, 1)]
        layers.append(read.snake(f"{block}.snake1", channels))
        layers.append(read.convolution(f"{block}.conv1", channels, 2 * channels, 2 * ratio, stride=ratio))
        channels *= 2
    return [*layers, read.snake("snake1", channels), read.convolution("conv2", channels, size, 3)]


def read_decoder(
    weights: CodecWeights, path: str, channels: int, ratios: tuple[int, ...], size: int, *, whole_frames: bool
) -> list[Layer]:
    """Read the decoder, without the tanh that some codecs put behind it: states [1, size, frames] to sound [1, 1, T].

    Args:
        path: what stands before the names of its weights.
        channels: of the first convolution; each block halves them.
        ratios: of the blocks, by which each multiplies the rate.
        whole_frames: an odd ratio gives exactly so many samples of each; otherwise the last of them is missing.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    read = _Reader(weights, path)
    layers: list[Layer] = [read.convolution("conv1", size, channels, 7)]
    for number, ratio in enumerate(ratios):
        block = f"block.{number}"
        layers.append(read.snake(f"{block}.snake1", channels))
        layers.append(read.transposed(f"{block}.conv_t1", channels, channels // 2, ratio, whole_frames=whole_frames))
        channels //= 2
        layers += [read.residual(f"{block}.res_unit{n}", channels, dilation) for n, dilation in enumerate(DILATIONS, 1)]
    return [*layers, read.snake("snake1", channels), read.convolution("conv2", channels, 1, 7)]


def frames(samples: int, ratios: tuple[int, ...]) -> int:
    """Return how many frames the encoder makes of so many samples; an odd ratio counts one sample more."""
    for ratio in ratios:
        samples = (samples + 2 * math.ceil(ratio / 2)) // ratio - 1
    return samples


@dataclass(frozen=True)
class _Reader:
    """Reads layers by the path of their names."""

    weights: CodecWeights
    path: str

    def convolution(
        self, name: str, inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1
    ) -> Layer:
        padding = math.ceil(stride / 2) if stride > 1 else (kernel - 1) * dilation // 2
        return Conv1D(
            self.tensor(f"{name}.weight", outputs, inputs, kernel),
            self.tensor(f"{name}.bias", outputs),
            stride,
            dilation,
            left=padding,
            right=padding,
        )

    def transposed(self, name: str, inputs: int, outputs: int, ratio: int, *, whole_frames: bool) -> Layer:
        weight = self.tensor(f"{name}.weight", inputs, outputs, 2 * ratio)
        padding = math.ceil(ratio / 2)
        right = padding - ratio % 2 if whole_frames else padding
        return ConvTranspose1D(weight, self.tensor(f"{name}.bias", outputs), ratio, left=padding, right=right)

    def residual(self, name: str, channels: int, dilation: int) -> Layer:
        first = self.convolution(f"{name}.conv1", channels, channels, 7, dilation=dilation)
        second = self.convolution(f"{name}.conv2", channels, channels, 1)
        return Residual([self.snake(f"{name}.snake1", channels), first, self.snake(f"{name}.snake2", channels), second])

    def snake(self, name: str, channels: int) -> Layer:
        return partial(snake, alpha=self.tensor(f"{name}.alpha", 1, channels, 1))

    def tensor(self, name: str, *shape: int) -> Tensor:
        return paddle.to_tensor(self.weights.take(f"{self.path}.{name}", *shape))
