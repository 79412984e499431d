"""Read a matrix out of a file straight into an array: widened, transposed and looked through in one pass by our kernel.

`native/source/weights.c` is that kernel. Where it cannot run, `SafetensorsFile.row_blocks` reads the same values with
NumPy, in several passes. Needs no Paddle.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from erniekit.native import library

if TYPE_CHECKING:
    import numpy as np

_TYPES = {"F32": 0, "BF16": 1, "F16": 2}  # as `enum stored_type` numbers them
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}


class StoredMatrix(NamedTuple):
    """The location of a matrix in a file.

    Attributes:
        dtype: of its values, the format's name such as "BF16".
        offset: of its first value, in bytes.
        stride: values of the file between the beginnings of two rows; more than `columns` in a part of a matrix.
    """

    path: Path
    dtype: str
    offset: int
    rows: int
    columns: int
    stride: int

    def part(self, axis: int, wanted: range) -> StoredMatrix:
        """Return consecutive rows (axis 0) or columns (axis 1)."""
        size = _SIZES.get(self.dtype, 0)
        if axis == 0:
            return self._replace(offset=self.offset + wanted.start * self.stride * size, rows=len(wanted))
        return self._replace(offset=self.offset + wanted.start * size, columns=len(wanted))


def read_matrix(matrix: StoredMatrix, out: np.ndarray, *, transposed: bool) -> bool:
    """Fill an array with a matrix, or with its transpose, by all threads; return whether that was done.

    If not, the array has no meaning yet: there is no kernel for these types, the file ends early, or values are NaN or
    infinite. Reading blocks of rows does it then, or says what is wrong.

    Args:
        out: [rows, columns], or [columns, rows] if `transposed`; of any shape with as many values in this order.
    """
    import numpy as np

    assert out.size == matrix.rows * matrix.columns, (out.shape, matrix)
    kernel = library.function("read_matrix", "ililllipp")
    if kernel is None or matrix.dtype not in _TYPES or out.dtype != np.float32 or not out.flags.c_contiguous:
        return False
    problems = np.zeros(1, np.int64)
    kind, order = _TYPES[matrix.dtype], int(transposed)
    with matrix.path.open("rb", buffering=0) as file:
        shape = (matrix.rows, matrix.columns, matrix.stride)
        kernel(file.fileno(), matrix.offset, kind, *shape, order, out.ctypes.data, problems.ctypes.data)
    return not problems[0]
