"""Stacks in pieces equal the whole to the bit, with small whole numbers for weights and samples."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import paddle
import pytest

from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D
from erniekit.codecs.stack import Residual, pieces_of, reach_of, through, through_in_pieces


def conv(rng, kernel, *, stride=1, dilation=1, causal=False, mode="constant"):
    padding = (kernel - 1) * dilation + 1 - stride
    right = 0 if causal else padding // 2
    weight = paddle.to_tensor(rng.integers(1, 3, (1, 1, kernel)).astype(np.float32))
    return Conv1D(weight, None, stride, dilation, left=padding - right, right=right, fill=True, mode=mode)


def transposed(rng, stride, *, left):
    weight = paddle.to_tensor(rng.integers(1, 3, (1, 1, 2 * stride)).astype(np.float32))
    return ConvTranspose1D(weight, None, stride, left=left, right=stride - left)


def encoder(rng, **kind):
    return [conv(rng, 3, **kind), Residual([conv(rng, 3, dilation=2, **kind)]), conv(rng, 4, stride=2, **kind),
            conv(rng, 6, stride=3, **kind), conv(rng, 3, **kind)]  # fmt: skip


def decoder(rng, *, left, **kind):
    return [conv(rng, 3, **kind), transposed(rng, 3, left=left), Residual([conv(rng, 3, dilation=2, **kind)]),
            transposed(rng, 2, left=left // 2), conv(rng, 3, **kind)]  # fmt: skip


KINDS = [{"causal": causal, "mode": mode} for causal in (True, False) for mode in ("constant", "reflect", "replicate")]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_encoder_in_pieces_is_the_whole(kind):
    rng = np.random.default_rng(1)
    layers = encoder(rng, **kind)
    for samples in (6, 61, 66, 131, 132):
        x = rng.integers(1, 4, (1, samples)).astype(np.float32)
        whole = through(layers, paddle.to_tensor(x[None]))
        for frames in (1, 2, 5, 30):
            pieces = list(through_in_pieces(layers, pieces_of(x, 6 * frames), down=6))
            assert paddle.concat(pieces, 2).numpy().tobytes() == whole.numpy().tobytes(), (samples, frames)
            assert samples < 100 or frames > 5 or len(pieces) > 2


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_decoder_in_pieces_is_the_whole(kind, left):
    rng = np.random.default_rng(2)
    layers = decoder(rng, left=left, **kind)
    for frames in (1, 11, 24):
        x = rng.integers(1, 4, (1, frames)).astype(np.float32)
        whole = through(layers, paddle.to_tensor(x[None]))
        for size in (1, 4, 30):
            pieces = list(through_in_pieces(layers, pieces_of(x, size), up=6))
            assert paddle.concat(pieces, 2).numpy().tobytes() == whole.numpy().tobytes(), (frames, size)


def test_pieces_may_end_in_zeros():
    pieces = pieces_of(np.arange(1, 12, dtype=np.float32)[None], 4, multiple=2)
    assert [piece.tolist() for piece in pieces] == [[[[1, 2, 3, 4]]], [[[5, 6, 7, 8]]], [[[9, 10, 11, 0]]]]
    assert [piece.shape for piece in pieces_of(np.zeros((2, 5)), None)] == [[1, 2, 5]]


def test_how_far_a_stack_sees():
    rng = np.random.default_rng(3)
    assert reach_of(encoder(rng, causal=True)) == (2 + 4 + 2 + 3 * 2 + 2 * 6, 1 + 2 * 2)
    assert reach_of(encoder(rng, causal=False)) == (1 + 2 + 1 + 2 * 2 + 1 * 6, 1 + 2 + 2 + 3 * 2 + 1 * 6)
    before, after = reach_of(decoder(rng, left=1, causal=False))
    assert before == 1 + Fraction(4, 3) + Fraction(2, 3) + Fraction(3, 6) + Fraction(1, 6)
    assert after == 1 + Fraction(1, 3) + Fraction(2, 3) + Fraction(0, 6) + Fraction(1, 6)


def test_the_memory_of_a_stack_does_not_grow():
    """What is held between pieces is what the stack sees."""
    seen = []
    layers = [conv(np.random.default_rng(4), 3), lambda x: seen.append(x.shape[2]) or x]
    list(through_in_pieces(layers, (paddle.ones([1, 1, 10]) for _ in range(50))))
    assert max(seen[1:]) <= 13
