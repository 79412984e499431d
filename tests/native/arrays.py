"""NumPy arrays for kernels that are called directly: outputs lie between guards, which a kernel must leave alone."""

from __future__ import annotations

import numpy as np

from erniekit.native import library

GUARD = 16
GUARD_VALUE = 77


class Output:
    """An array for a kernel to write, of zeros or `values`, with guards on both sides."""

    def __init__(self, *shape: int, dtype: type = np.float32, values: np.ndarray | float = 0) -> None:
        size = int(np.prod(shape))
        self._memory = np.full(size + 2 * GUARD, GUARD_VALUE, dtype)
        self._array = self._memory[GUARD : GUARD + size].reshape(shape)
        self._array[...] = values
        self.pointer = self._array.ctypes.data

    def read(self) -> np.ndarray:
        """Return what was written; fail if a guard was."""
        assert (self._memory[:GUARD] == GUARD_VALUE).all() and (self._memory[-GUARD:] == GUARD_VALUE).all()
        return self._array.copy()


def kernel(name: str, arguments: str):
    """Return a kernel; the test has the fixture `native_kernels` or `native_path`."""
    found = library.function(name, arguments)
    assert found is not None
    return found
