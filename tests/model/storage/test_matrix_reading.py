"""Reading by the kernel against NumPy: types, odd sizes, parts, values that are not finite, files that end early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.model.storage.matrix_reading import StoredMatrix, read_matrix
from erniekit.model.storage.precision import round_to_bfloat16

pytestmark = pytest.mark.usefixtures("native_kernels")

GUARD = 7.0
SHAPES = [(1, 1), (1, 17), (17, 1), (7, 7), (16, 16), (15, 33), (255, 31), (1023, 300), (40, 20_000)]


def write(path: Path, values: np.ndarray, dtype: str, before: int = 24) -> StoredMatrix:
    """A file of float32 values that has something else before them."""
    stored = round_to_bfloat16(values) if dtype == "BF16" else values.astype({"F32": "<f4", "F16": "<f2"}[dtype])
    path.write_bytes(b"x" * before + stored.tobytes())
    rows, columns = values.shape
    return StoredMatrix(path, dtype, before, rows, columns, columns)


def expected(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (round_to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def read(matrix: StoredMatrix, transposed: bool) -> np.ndarray | None:
    """What the kernel makes of a matrix, which is checked to touch nothing behind its output."""
    size = matrix.rows * matrix.columns
    memory = np.full(size + 64, GUARD, np.float32)
    done = read_matrix(matrix, memory[:size], transposed=transposed)
    np.testing.assert_array_equal(memory[size:], GUARD)
    shape = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
    return memory[:size].reshape(shape) if done else None


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_type_and_shape_is_read_to_the_bit(dtype: str, shape: tuple[int, int], tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    matrix = write(tmp_path / "file", values, dtype)
    np.testing.assert_array_equal(read(matrix, False), expected(values, dtype))
    np.testing.assert_array_equal(read(matrix, True), expected(values, dtype).T)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_parts_are_rows_and_columns_of_the_matrix(dtype: str, transposed: bool, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((50, 70), np.float32)
    matrix = write(tmp_path / "file", values, dtype).part(0, range(3, 40)).part(1, range(33, 70))
    part = expected(values, dtype)[3:40, 33:70]
    np.testing.assert_array_equal(read(matrix, transposed), part.T if transposed else part)


@pytest.mark.parametrize("transposed", [False, True])
def test_all_finite_halves_are_read_to_the_bit(transposed: bool, tmp_path: Path) -> None:
    """Subnormal ones and both zeros, too."""
    codes = np.arange(65536, dtype=np.uint16)
    values = codes[(codes & 0x7C00) != 0x7C00].view(np.float16).reshape(-1, 64).astype(np.float32)
    found = read(write(tmp_path / "file", values, "F16"), transposed)
    assert found is not None
    np.testing.assert_array_equal((found.T if transposed else found).copy().view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("place", [(0, 0), (36, 50), (16, 15), (5, 48)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(
    dtype: str, place: tuple[int, int], value: float, tmp_path: Path
) -> None:
    values = np.full((37, 51), 65504.0, np.float32)  # the largest half
    assert read(write(tmp_path / "file", values, dtype), True) is not None
    values[place] = value
    matrix = write(tmp_path / "file", values, dtype)
    assert read(matrix, False) is None and read(matrix, True) is None


@pytest.mark.parametrize("transposed", [False, True])
def test_a_file_that_ends_early_is_not_read(transposed: bool, tmp_path: Path) -> None:
    matrix = write(tmp_path / "file", np.ones((600, 900), np.float32), "F32")
    data = matrix.path.read_bytes()
    matrix.path.write_bytes(data[:-1])
    assert read(matrix, transposed) is None


def test_other_types_and_arrays_are_left_to_the_other_way(tmp_path: Path) -> None:
    matrix = write(tmp_path / "file", np.ones((4, 4), np.float32), "F32")
    assert not read_matrix(matrix._replace(dtype="F64"), np.empty(16, np.float32), transposed=False)
    assert not read_matrix(matrix, np.empty(16, np.float64), transposed=False)
    assert not read_matrix(matrix, np.empty((4, 8), np.float32)[:, ::2], transposed=False)
