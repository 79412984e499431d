"""Convolutions and their padding, against plain NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.codecs import convolutions
from erniekit.codecs.convolutions import Conv1D, ConvTranspose1D, pad_time, snake


def _random(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _convolve(x: np.ndarray, conv: Conv1D) -> np.ndarray:
    """Return the convolution of a padded x [in, T] by its definition."""
    weight = conv.weight.numpy().astype(float)
    width = weight.shape[1]
    frames = (x.shape[1] - conv.span) // conv.stride + 1
    y = np.zeros((weight.shape[0], frames))
    for channel in range(weight.shape[0]):
        group = channel // (weight.shape[0] // conv.groups)
        for frame in range(frames):
            part = x[group * width : (group + 1) * width, frame * conv.stride :][:, : conv.span : conv.dilation]
            y[channel, frame] = (weight[channel] * part).sum() + float(conv.bias[channel])
    return y


@pytest.mark.parametrize(("stride", "dilation", "groups", "length"), [(1, 1, 1, 9), (3, 1, 2, 17), (1, 3, 1, 23)])
def test_a_convolution_is_that_of_its_definition(stride: int, dilation: int, groups: int, length: int) -> None:
    conv = Conv1D(
        paddle.to_tensor(_random(4, 4 // groups, 5)), paddle.to_tensor(_random(4)), stride, dilation, groups, 2, 1
    )
    x = _random(4, length, seed=4)
    y = conv(paddle.to_tensor(x[None])).numpy()[0]
    np.testing.assert_allclose(y, _convolve(np.pad(x, ((0, 0), (2, 1))), conv), atol=1e-5)


@pytest.mark.parametrize("dilation", [1, 9])
def test_a_long_convolution_in_tiles_is_that_at_once(dilation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    conv = Conv1D(paddle.to_tensor(_random(6, 5, 7)), paddle.to_tensor(_random(6)), dilation=dilation, left=4, right=2)
    x = paddle.to_tensor(_random(1, 5, 5003))
    at_once = conv(x).numpy()
    monkeypatch.setattr(convolutions, "UNFOLDED_BYTES", 1)
    calls = []
    whole = Conv1D._at_once
    monkeypatch.setattr(Conv1D, "_at_once", lambda self, x: calls.append(x.shape[2]) or whole(self, x))
    np.testing.assert_allclose(conv(x).numpy(), at_once, atol=1e-5)
    assert len(calls) == 5


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 97])
def test_filled_convolutions_give_a_frame_for_every_stride_begun(length: int) -> None:
    conv = Conv1D(paddle.ones([1, 1, 6]), None, stride=3, left=2, right=1, fill=True)
    x = np.arange(1, length + 1, dtype=np.float32)
    expected = np.pad(x, (2, 1 + -length % 3))
    y = conv(paddle.to_tensor(x[None, None])).numpy()[0, 0]
    assert len(y) == -(-length // 3)
    np.testing.assert_array_equal(y, [expected[3 * frame : 3 * frame + 6].sum() for frame in range(len(y))])


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_padding_is_numpys(mode: str) -> None:
    x = _random(1, 2, 7)
    named = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}[mode]
    for left, right in ((0, 0), (3, 0), (0, 4), (6, 5)):
        expected = np.pad(x, ((0, 0), (0, 0), (left, right)), mode=named)
        np.testing.assert_array_equal(pad_time(paddle.to_tensor(x), left, right, mode).numpy(), expected)


def test_reflection_of_short_sound_puts_zeros_behind_it_first() -> None:
    """Expected: 1 2 | 0 0 0 reflected by 4 and 1: 0 0 0 2 | 1 2 0 0 0 | 0, cut to 2 + 4 + 1 samples."""
    y = pad_time(paddle.to_tensor([[[1.0, 2.0]]]), 4, 1, "reflect")
    assert y.tolist() == [[[0, 0, 0, 2, 1, 2, 0]]]


@pytest.mark.parametrize(("stride", "kernel", "groups"), [(1, 3, 1), (2, 4, 1), (3, 5, 2)])
def test_a_transposed_convolution_spreads_every_frame(stride: int, kernel: int, groups: int) -> None:
    weight, bias, x = _random(4, 2, kernel), _random(2 * groups), _random(4, 6, seed=5)
    full = np.zeros((2 * groups, 5 * stride + kernel)) + bias[:, None]
    for channel in range(4):
        outputs = slice(channel // (4 // groups) * 2, channel // (4 // groups) * 2 + 2)
        for frame in range(6):
            full[outputs, frame * stride : frame * stride + kernel] += weight[channel] * x[channel, frame]
    conv = ConvTranspose1D(paddle.to_tensor(weight), paddle.to_tensor(bias), stride, groups, left=2, right=1)
    np.testing.assert_allclose(conv(paddle.to_tensor(x[None])).numpy()[0], full[:, 2:-1], atol=1e-5)


def test_snake_is_its_formula_and_leaves_its_input() -> None:
    x, alpha = _random(1, 3, 11), np.array([[[0.5], [2.0], [-1.0]]], np.float32)
    tensor = paddle.to_tensor(x)
    expected = x + np.sin(alpha.astype(float) * x) ** 2 / alpha
    np.testing.assert_allclose(snake(tensor, paddle.to_tensor(alpha)).numpy(), expected, atol=1e-6)
    np.testing.assert_array_equal(tensor.numpy(), x)
