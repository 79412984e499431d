from __future__ import annotations

import threading

import numpy as np
import paddle
import pytest

from erniekit.model import attention as attention_module
from erniekit.model import threads
from erniekit.model.attention import AttentionPlan, attention
from erniekit.model.threads import parallel_map
from erniekit.native import mkl, openmp


@pytest.fixture
def three_threads(monkeypatch):
    """As with OMP_NUM_THREADS=3, whatever the tests run with."""
    if mkl.library() is None:
        pytest.skip("this build of Paddle has no MKL")
    monkeypatch.setattr(threads, "_mkl_threads", lambda: 3)
    threads._pool.cache_clear()
    yield
    threads._pool().shutdown()
    threads._pool.cache_clear()


def test_results_are_in_the_order_of_the_items_and_threads_share_them(three_threads):
    meeting = threading.Barrier(3)

    def compute(item: int) -> tuple[int, int]:
        if item < 3:
            meeting.wait(timeout=60)  # passes only with three threads
        return item * item, threading.get_ident()

    results = parallel_map(compute, range(20))
    assert [square for square, _ in results] == [item * item for item in range(20)]
    assert len({thread for _, thread in results}) == 3


def test_threads_share_those_of_the_process(three_threads, monkeypatch):
    monkeypatch.setattr(threads, "_mkl_threads", lambda: 6)
    meeting = threading.Barrier(3)

    def thread_count(item: int) -> int:
        meeting.wait(timeout=60)
        return openmp.runtime().omp_get_max_threads()

    assert parallel_map(thread_count, range(3)) == [2, 2, 2]


def test_threads_record_no_gradient_and_recording_goes_on_after(three_threads):
    x = paddle.ones([4])
    x.stop_gradient = False
    assert all(result.stop_gradient for result in parallel_map(lambda factor: x * factor, [1.0, 2.0, 3.0]))
    assert not (x * 2.0).stop_gradient


def test_an_error_in_any_thread_is_raised_and_threads_are_restored(three_threads):
    before = [mkl.library().MKL_Get_Max_Threads(), openmp.runtime().omp_get_max_threads()]

    def fail_at_two(item: int) -> int:
        if item == 2:
            raise ValueError("two")
        return item

    with pytest.raises(ValueError, match="two"):
        parallel_map(fail_at_two, range(4))
    assert [mkl.library().MKL_Get_Max_Threads(), openmp.runtime().omp_get_max_threads()] == before
    assert parallel_map(lambda item: item, range(4)) == [0, 1, 2, 3]


def test_one_thread_computes_in_order_where_there_is_one(monkeypatch):
    monkeypatch.setattr(threads, "_mkl_threads", lambda: 1)
    seen: list[int] = []
    parallel_map(seen.append, range(5))
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_does_not_depend_on_which_thread_has_which_head(three_threads, monkeypatch, dropout):
    monkeypatch.setattr(attention_module, "has_native_attention", lambda *_: False)
    rng = np.random.default_rng(0)
    ends = np.repeat([70, 300, 400], [70, 230, 100]).astype(np.int32).reshape(1, 1, -1, 1)
    plan = AttentionPlan.build(ends)
    values = [rng.standard_normal((1, 400, heads, 16), np.float32) for heads in (6, 3, 3, 6)]

    def run() -> list[np.ndarray]:
        q, k, v = (paddle.to_tensor(value, stop_gradient=False) for value in values[:3])
        out = attention(q, k, v, plan, dropout=dropout, key=(1, 2))
        out.backward(paddle.to_tensor(values[3]))
        return [tensor.numpy() for tensor in (out, q.grad, k.grad, v.grad)]

    in_threads = [run() for _ in range(3)]
    monkeypatch.setattr(threads, "_mkl_threads", lambda: 1)
    alone = run()
    for once in in_threads:
        for a, b, c in zip(once, in_threads[0], alone, strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)  # a product rounds as its number of threads has it
