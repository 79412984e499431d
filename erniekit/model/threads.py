"""Run kernels in several Python threads on a CPU, where Paddle uses all threads (MKL's) for matrix products only.

Paddle releases Python's lock while a kernel runs, so kernels started by several Python threads run concurrently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import paddle

from erniekit.native import mkl, openmp

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return [function(item) for item in items]; on a CPU in threads, each of which takes the next item when it is
    free.

    Products and kernels in `function` share the threads of the process. It runs without gradients, as the body of a
    PyLayer does anyway, and the result for an item does not depend on the thread that takes it.
    """
    count = min(_threads(), len(items))
    if count < 2:
        return [function(item) for item in items]
    # for the calling thread; 0: as many as the process has
    set_product_threads = mkl.library().MKL_Set_Num_Threads_Local
    own_products = _threads() // count
    waiting = deque(enumerate(items))
    results: dict[int, Result] = {}

    def compute() -> None:
        set_product_threads(own_products)
        with openmp.threads(own_products):
            while (next_one := _take(waiting)) is not None:
                number, item = next_one
                results[number] = function(item)

    others = [_pool().submit(compute) for _ in range(count - 1)]
    try:
        with paddle.no_grad():
            compute()
    finally:
        set_product_threads(0)
        wait(others)
    for other in others:
        other.result()
    return [results[number] for number in range(len(items))]


def _take(waiting: deque[Item]) -> Item | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _threads() -> int:
    """Return the number of threads: one on a GPU, and while a program is recorded."""
    if not paddle.in_dynamic_mode() or paddle.get_device() != "cpu":
        return 1
    return _mkl_threads()


@lru_cache(maxsize=1)
def _mkl_threads() -> int:
    library = mkl.library()
    return 1 if library is None else int(library.MKL_Get_Max_Threads())


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads() - 1, "erniekit-compute", initializer=_without_gradients)


def _without_gradients() -> None:
    """Disable gradients in this thread; Paddle's setting is per thread."""
    paddle.base.framework._dygraph_tracer()._has_grad = False
