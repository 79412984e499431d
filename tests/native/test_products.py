"""Products of a few rows equal float64 products in every form of the weight, and stay inside of their arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from erniekit.model.quantization.codes import dequantize, quantize
from erniekit.model.quantization.formats import INT4, INT8, NF4
from erniekit.native import library, linear
from erniekit.native.linear import BF16, BYTES, INPUTS_FIRST, NIBBLES, OUTPUTS_FIRST, LinearWeight

pytestmark = pytest.mark.usefixtures("native_kernels")

GUARD = np.float32(1e30)
SIZES = [(1, 1), (7, 17), (16, 64), (17, 255), (64, 7), (96, 33), (255, 66), (256, 130)]


def product(described, x, outputs):
    """x W by the kernel; the memory around what it may write must be as before."""
    size = ctypes.c_int64()
    address, threads = ctypes.addressof(described), ctypes.c_int64()
    sizes = ctypes.addressof(threads), ctypes.addressof(size)
    library.function("linear_memory", "plpp")(address, len(x), *sizes)
    y, spare = np.full(len(x) * outputs + 64, GUARD), np.full(size.value + 64, GUARD)
    run = library.function("linear_product", "pplppllp")
    run(0, address, len(x), x.ctypes.data, y.ctypes.data, 1, size.value, spare.ctypes.data)
    assert (y[len(x) * outputs :] == GUARD).all() and (spare[size.value :] == GUARD).all()
    return y[: len(x) * outputs].reshape(len(x), outputs)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_product(got, x, weight):
    expected = x.astype(np.float64) @ weight.astype(np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * (np.abs(x) @ np.abs(weight)).max())


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 65])
def test_float_weights_in_both_orders(rows, inputs, outputs):
    x, weight = draw(0, rows, inputs), draw(1, inputs, outputs)
    lines = LinearWeight(INPUTS_FIRST, inputs, outputs, weight.ctypes.data)
    assert_product(product(lines, x, outputs), x, weight)
    turned = np.ascontiguousarray(weight.T)
    assert_product(product(LinearWeight(OUTPUTS_FIRST, inputs, outputs, turned.ctypes.data), x, outputs), x, weight)


def rounded(weight):
    """bfloat16 [out, in] of W [in, out], and the values that it stands for."""
    halves = np.ascontiguousarray(weight.T).view(np.uint32) >> 16
    return halves.astype(np.uint16), np.ascontiguousarray((halves << 16).view(np.float32).T)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 16, 65])
def test_weights_of_bfloat16(rows, inputs, outputs):
    x, (halves, weight) = draw(0, rows, inputs), rounded(draw(1, inputs, outputs))
    assert_product(product(LinearWeight(BF16, inputs, outputs, halves.ctypes.data), x, outputs), x, weight)


@pytest.mark.parametrize("rows", [1, 9, 64])
def test_threads_divide_a_product_and_change_no_bit(rows):
    x, (halves, _) = draw(0, rows, 96), rounded(draw(1, 96, 700))
    described = LinearWeight(BF16, 96, 700, halves.ctypes.data)
    expected = product(described, x, 700)
    got = np.full_like(expected, GUARD)
    linear.product(described, rows, x.ctypes.data, got.ctypes.data)
    np.testing.assert_array_equal(got, expected)


def of_codes(packed, levels, form, inputs, outputs):
    """Describe a quantized weight, which the caller keeps."""
    described = LinearWeight(BYTES if form is INT8 else NIBBLES, inputs, outputs, packed.codes.ctypes.data)
    described.scales, described.levels = packed.scales.ctypes.data, levels.ctypes.data
    described.group = form.group(inputs)
    return described


@pytest.mark.parametrize("form", [INT8, INT4, NF4], ids=lambda form: form.name)
@pytest.mark.parametrize(("inputs", "outputs"), [(inputs + inputs % 2, outputs) for inputs, outputs in SIZES])
@pytest.mark.parametrize("rows", [1, 6, 65])
def test_codes(rows, inputs, outputs, form):
    x, packed = draw(0, rows, inputs), quantize(draw(1, outputs, inputs), form)
    levels = np.array(form.levels or [0], np.float32)
    described = of_codes(packed, levels, form, inputs, outputs)
    assert_product(product(described, x, outputs), x, dequantize(packed, form).T)


def assert_rows_keep_their_bits(described, x):
    together = product(described, x, described.outputs)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12):
        assert np.array_equal(product(described, x[:rows].copy(), described.outputs), together[:rows])


@pytest.mark.parametrize("inputs", [100, 112, 128])
def test_the_number_of_rows_changes_no_bit_of_a_row(inputs):
    x, weight = draw(0, 16, inputs), draw(1, inputs, 70)
    turned, halves = np.ascontiguousarray(weight.T), rounded(weight)[0]
    for form, values in ((INPUTS_FIRST, weight), (OUTPUTS_FIRST, turned), (BF16, halves)):
        assert_rows_keep_their_bits(LinearWeight(form, inputs, 70, values.ctypes.data), x)


@pytest.mark.parametrize("form", [INT8, INT4, NF4], ids=lambda form: form.name)
@pytest.mark.parametrize("inputs", [100, 112, 128])  # groups of 4, 16 and 64 inputs
def test_the_number_of_rows_changes_no_bit_of_codes(inputs, form):
    packed, levels = quantize(draw(1, 70, inputs), form), np.array(form.levels or [0], np.float32)
    assert_rows_keep_their_bits(of_codes(packed, levels, form, inputs, 70), draw(0, 16, inputs))


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_adapter_scale_and_bias(rows):
    inputs, outputs, rank = 40, 50, 3
    x, weight, a, b = draw(0, rows, inputs), draw(1, inputs, outputs), draw(2, inputs, rank), draw(3, rank, outputs)
    scale, bias = draw(4, outputs), draw(5, outputs)
    described = LinearWeight(INPUTS_FIRST, inputs, outputs, weight.ctypes.data, bias=bias.ctypes.data, rank=rank)
    described.lora_a, described.lora_b, described.lora_scale = a.ctypes.data, b.ctypes.data, 0.5
    described.column_scale = scale.ctypes.data
    expected = (x @ weight + 0.5 * (x @ a) @ b) * scale + bias
    np.testing.assert_allclose(product(described, x, outputs), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
