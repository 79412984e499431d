"""Products and rounding through oneDNN, compared with NumPy on operands that were rounded to bfloat16."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest

from erniekit.native import onednn, openmp

pytestmark = pytest.mark.skipif(onednn.problem() is not None, reason=str(onednn.problem()))

GUARD = 7.5
SHAPES = [(1, 1, 1), (7, 17, 255), (1, 64, 33), (64, 1, 16), (17, 7, 1), (130, 65, 48)]


def bits(values):
    """Round float32 to the nearest bfloat16, ties to even: the upper half of the bits."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


def floats(upper):
    return (upper.astype(np.uint32) << 16).view(np.float32)


def matrix(rows, columns, seed):
    return bits(np.random.default_rng(seed).standard_normal((rows, columns), np.float32))


def multiply(a, b, *, transpose_a=False, transpose_b=False, start=None):
    """A B by oneDNN, or start + A B; with numbers behind the output that must stay."""
    (m, k), n = a.shape, b.shape[1]
    guarded = np.full(m * n + 16, GUARD, np.float32)
    if start is not None:
        guarded[: m * n] = start.ravel()
    left, right = (np.ascontiguousarray(x.T if turned else x) for x, turned in ((a, transpose_a), (b, transpose_b)))
    pointers = (array.ctypes.data for array in (left, right, guarded))
    onednn.multiply(m, n, k, *pointers, transpose_a=transpose_a, transpose_b=transpose_b, add=start is not None)
    assert (guarded[m * n :] == GUARD).all()
    return guarded[: m * n].reshape(m, n)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_any_size_and_orientation_equal_those_of_the_rounded_operands(shape):
    m, n, k = shape
    a, b = matrix(m, k, 0), matrix(k, n, 1)
    expected = floats(a).astype(np.float64) @ floats(b).astype(np.float64)
    tolerance = 1e-6 * np.abs(floats(a)) @ np.abs(floats(b))  # of sums in float32
    for transpose_a, transpose_b in product((False, True), repeat=2):
        out = multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
        assert (np.abs(out - expected) <= tolerance).all()
        start = floats(matrix(m, n, 2))
        added = multiply(a, b, transpose_a=transpose_a, transpose_b=transpose_b, start=start)
        assert (np.abs(added - start - expected) <= tolerance + 1e-6 * np.abs(start) + 1e-6).all()


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(100_003).astype(np.float32) * np.exp(rng.uniform(-60, 60, 100_003)).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38]
    out = np.full(len(values) + 16, 0x1234, np.uint16)
    onednn.round_to_bfloat16(len(values), values.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out[: len(values)], bits(values))
    assert (out[len(values) :] == 0x1234).all()


def test_numbers_below_the_smallest_normal_one_count_as_zero():
    values, out = np.array([1e-39, -1e-40, 1.2e-38], np.float32), np.empty(3, np.uint16)
    onednn.round_to_bfloat16(3, values.ctypes.data, out.ctypes.data)
    assert out.tolist() == [0, 0x8000, 0x0083]
    assert multiply(np.full((1, 1), 0x0040, np.uint16), np.full((1, 1), 0x7000, np.uint16)) == 0


@pytest.mark.parametrize("count", [0, 1, 7, 17, 255, 4097])
def test_any_count_is_rounded_and_nothing_behind_it_is_written(count):
    values = np.random.default_rng(count).standard_normal(count + 1, np.float32)
    out = np.full(count + 16, 0x1234, np.uint16)
    onednn.round_to_bfloat16(count, values.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out[:count], bits(values[:count]))
    assert (out[count:] == 0x1234).all()


def test_values_that_are_not_finite_stay_so():
    a, b = matrix(3, 4, 0), matrix(4, 2, 1)
    a[1, 2] = bits(np.float32(np.inf))
    assert np.isfinite(multiply(a, b)).all(axis=1).tolist() == [True, False, True]
    a[1, 2] = 0x7FC0
    assert np.isnan(multiply(a, b)).all(axis=1).tolist() == [False, True, False]


def test_many_lengths_do_not_make_more_primitives():
    b = matrix(8, 24, 1)
    multiply(matrix(3, 8, 0), b)
    caches = (onednn._product, onednn._rounding, onednn._matrix)
    for tokens in range(1, 400):
        multiply(matrix(tokens, 8, 0), b)
        values, out = np.ones(tokens * 8, np.float32), np.empty(tokens * 8, np.uint16)
        onednn.round_to_bfloat16(values.size, values.ctypes.data, out.ctypes.data)
    assert onednn._product.cache_info().currsize <= 8
    assert onednn._rounding.cache_info().currsize <= 64
    assert all(cache.cache_info().currsize <= cache.cache_info().maxsize for cache in caches)


def test_several_threads_at_once_give_what_one_gives():
    work = [(matrix(m, 64, m), matrix(64, 40, m + 1)) for m in (1, 9, 33, 128)] * 8

    def compute(operands):  # the number of OpenMP's threads, which the bits depend on, is a setting of each thread
        with openmp.threads(2):
            return multiply(*operands)

    expected = [compute(operands) for operands in work]
    with ThreadPoolExecutor(4) as pool:
        for out, wanted in zip(pool.map(compute, work), expected, strict=True):
            np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_operands_give_the_same_bits(threads):
    a, b = matrix(300, 700, 0), matrix(700, 500, 1)
    with openmp.threads(threads):
        first = multiply(a, b, transpose_a=True)
        assert all((multiply(a, b, transpose_a=True) == first).all() for _ in range(5))


def test_products_use_the_threads_of_paddles_runtime():
    code = (
        "import ctypes, os; from erniekit.native import onednn, openmp\n"
        "def threads(): onednn.speedup.__wrapped__(); onednn.multiply(512, 512, 512, *map(ctypes.addressof, buffers));"
        " return len(os.listdir('/proc/self/task'))\n"
        "buffers = [(ctypes.c_float * 512**2)() for _ in range(3)]\n"
        "alone = threads(); openmp.runtime().omp_set_num_threads(3); print(alone, threads())"
    )
    alone, three = map(int, _run(code, OMP_NUM_THREADS="1").split())
    assert three >= alone + 2


def test_a_processor_without_bfloat16_is_told():
    code = "from erniekit.native import onednn; print(onednn.problem())"
    assert _run(code, ONEDNN_MAX_CPU_ISA="AVX512_CORE_VNNI").startswith("this processor multiplies no bfloat16")


def test_a_paddle_without_the_library_is_told(monkeypatch):
    monkeypatch.setattr(onednn, "_library_file", lambda: None)
    assert onednn.problem.__wrapped__() == "this build of Paddle has no oneDNN library"


def test_another_major_version_is_told(monkeypatch):
    monkeypatch.setattr(onednn, "VERSION", 4)
    assert "not 4.x" in onednn.problem.__wrapped__()


def test_wrong_products_are_noticed(monkeypatch):
    right = onednn.multiply

    def wrong(m, n, k, a, b, c, **options):
        right(m, n, k, a, b, c, **options)
        if options["add"]:
            ctypes.c_float.from_address(c).value += 1

    monkeypatch.setattr(onednn, "multiply", wrong)
    assert "wrongly" in onednn.problem.__wrapped__()


def test_statuses_of_the_library_are_errors():
    with pytest.raises(MemoryError):
        onednn._check(onednn.OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match="status 2"):
        onednn._check(2)


def test_the_measured_rate_is_that_of_one_thread_and_threads_are_restored():
    with openmp.threads(3):
        assert 0.2 < onednn.speedup.__wrapped__() < 40
        assert openmp.runtime().omp_get_max_threads() == 3


def _run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout.strip()
