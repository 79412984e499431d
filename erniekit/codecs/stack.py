"""Stacks of convolutions, computed over a long recording piece by piece, with what each piece needs of its neighbours.

The states of one layer take up to 20 MB for each second of sound. A stack therefore takes sound, or frames, in pieces
of a second or so, and the memory that it needs does not depend on the length of a recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D

PIECE_SECONDS = 4  # of sound that a codec computes at once, where nothing less is as fast
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Residual:
    """A stack whose result is added to its input, or to what `shortcut` makes of it. Neither changes the length."""

    layers: Sequence[Layer]
    shortcut: Sequence[Layer] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return through(self.layers, x) + through(self.shortcut, x)


class Reach(NamedTuple):
    """How far the last layer of a stack sees, in samples of its input: before and after those at the same time."""

    before: Fraction
    after: Fraction


def through(layers: Iterable[Layer], x: Tensor) -> Tensor:
    """Return x [1, channels, T] after all layers."""
    for layer in layers:
        x = layer(x)
    return x


def reach_of(layers: Iterable[Layer]) -> Reach:
    """Return how far a stack sees; layers without convolutions are taken to see one sample."""
    before = after = Fraction(0)
    scale = Fraction(1)  # samples of the stack's input for each sample of the layer's input
    for layer in _convolutions(layers):
        if isinstance(layer, ConvTranspose1D):
            kernel = layer.weight.shape[2]
            scale /= layer.stride
            before += (kernel - 1 - layer.left) * scale
            after += layer.left * scale
        else:
            before += layer.left * scale
            after += (layer.span - 1 - layer.left) * scale
            scale *= layer.stride
    return Reach(before, after)


def _convolutions(layers: Iterable[Layer]) -> Iterator[Conv1D | ConvTranspose1D]:
    for layer in layers:
        if isinstance(layer, Residual):
            yield from _convolutions(layer.layers)
        elif isinstance(layer, (Conv1D, ConvTranspose1D)):
            yield layer


def pieces_of(x: np.ndarray, size: int | None, *, multiple: int = 1) -> Iterator[Tensor]:
    """Yield tensors [1, channels, size] of x [channels, T]; the last one may be shorter.

    Args:
        size: None: all at once.
        multiple: zeros follow x up to a multiple of this.
    """
    size = size or x.shape[1]
    for start in range(0, x.shape[1], size):
        piece = x[:, start : start + size]
        yield paddle.to_tensor(np.pad(piece, ((0, 0), (0, -piece.shape[1] % multiple)))[None])


def through_in_pieces(
    layers: Sequence[Layer], pieces: Iterable[Tensor], *, down: int = 1, up: int = 1
) -> Iterator[Tensor]:
    """Yield what a stack makes of a recording that comes in pieces, in other pieces.

    Together they equal what it makes of the whole, but for rounding.

    Args:
        layers: none of them may look at more than its convolutions show, such as a norm over time.
        pieces: [1, channels, T], where T is a multiple of `down`, except the last one's.
        down: samples of the input for each frame of the result; 1 if the stack makes more samples of each.
        up: samples of the result for each frame of the input; 1 if the stack makes fewer.
    """
    before, after = reach_of(layers)
    lookahead = math.ceil((after + 1) / down) - 1
    lookback = math.ceil((before + down - 1) / down)  # a reflection at the end looks back further, but within a frame
    held: Tensor | None = None
    given = 0  # frames in `held` whose result has been given
    coming = iter(pieces)
    piece = next(coming, None)
    while piece is not None:
        following = next(coming, None)
        held = piece if held is None else paddle.concat([held, piece], 2)
        frames = held.shape[2] // down
        if following is None:
            yield through(layers, held)[:, :, given * up :]
        elif frames > given + lookahead and frames > lookback + lookahead:
            complete = frames - lookahead
            yield through(layers, held)[:, :, given * up : complete * up]
            first = max(0, complete - lookback)
            held, given = held[:, :, first * down :], complete - first
        piece = following
