"""The OpenMP runtime of Paddle's wheel: MKL, oneDNN and our kernels share its threads."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def paddle_libraries() -> Path | None:
    """Return the folder of the libraries in Paddle's wheel, without importing Paddle; None: there is no Paddle."""
    spec = importlib.util.find_spec("paddle")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "libs"


@lru_cache(maxsize=1)
def runtime() -> Any:
    """Load the runtime, whose symbols libraries then use that are loaded later; None where Paddle has another one.

    Libraries that were linked with another runtime, as oneDNN with GNU's, find the same functions here first.
    """
    folder = paddle_libraries()
    if folder is None or not (folder / "libiomp5.so").is_file():
        return None
    return ctypes.CDLL(str(folder / "libiomp5.so"), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let kernels that the calling thread runs inside use this many threads."""
    openmp = runtime()
    if openmp is None:
        yield
        return
    before = int(openmp.omp_get_max_threads())
    openmp.omp_set_num_threads(count)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)
