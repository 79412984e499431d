"""Draws by the kernel are those of NumPy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.model.normal_draws import NormalDraws, ziggurat
from erniekit.native import library

pytestmark = pytest.mark.usefixtures("native_kernels")


def numpy_draws(seeds: list[int], deviation: float, count: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(seeds))
    return generator.standard_normal(count, np.float32) * np.float32(deviation)


@pytest.mark.parametrize("seeds", [[0, 5], [3, 2**64 - 1], [2**40, 0]], ids=str)
def test_draws_are_those_of_numpy(seeds: list[int]) -> None:
    """A million, in which every layer and the tail occur."""
    values = np.empty(1_000_000, np.float32)
    NormalDraws(seeds, 0.02).fill(values)
    np.testing.assert_array_equal(values, numpy_draws(seeds, 0.02, len(values)))
    assert np.abs(values).max() > 0.02 * ziggurat()["edge"][0]


def test_how_many_are_drawn_at_once_does_not_matter() -> None:
    draws, expected, start = NormalDraws([1, 2], 1.0), numpy_draws([1, 2], 1.0, 3000), 0
    for count in (1, 7, 17, 255, 511, 512, 513, 1, 1183):
        memory = np.full(count + 32, 9.0, np.float32)
        draws.fill(memory[:count])
        np.testing.assert_array_equal(memory[:count], expected[start : start + count])
        np.testing.assert_array_equal(memory[count:], 9.0)
        start += count
    assert start == len(expected)


def test_numpy_draws_the_same_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.empty((2, 300), np.float32)
    NormalDraws([4], 0.5).fill(first)
    monkeypatch.setattr(library, "function", lambda name, arguments: None)
    NormalDraws([4], 0.5).fill(second)
    np.testing.assert_array_equal(first, second)


def test_layers_end_where_those_of_numpy_do() -> None:
    """NumPy is given chosen bits as the half of a word that is left: it takes no others where they lie inside."""
    (limits,), (widths,) = ziggurat()["limits"], ziggurat()["widths"]
    bits = np.random.PCG64(1)
    before, generator = bits.state, np.random.Generator(bits)
    for layer in range(256):
        for magnitude in range(max(0, limits[layer] - 1), min(2**23, limits[layer] + 2)):
            bits.state = {**before, "has_uint32": 1, "uinteger": magnitude << 9 | layer}
            drawn = generator.standard_normal(dtype=np.float32)
            inside = bits.state["state"] == before["state"] and not bits.state["has_uint32"]
            assert inside == (magnitude < limits[layer]), (layer, magnitude)
            assert not inside or drawn == np.float32(magnitude) * widths[layer]
