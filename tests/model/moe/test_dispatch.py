"""Tokens get to their experts and back by native kernels as by Paddle's operators."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import native
from erniekit.model.moe import dispatch, experts
from erniekit.model.moe.dispatch import LOCAL_DISPATCHER

RNG = np.random.default_rng(0)
TOKENS, EACH, EXPERTS, SIZE = 9, 3, 5, 12
CHOSEN = np.stack([RNG.permutation(EXPERTS - 1)[:EACH] for _ in range(TOKENS)])  # the last expert has no tokens


class Scaling:
    """Experts that multiply their rows by 1, 2, 3 and so on."""

    numbers, total = range(EXPERTS), EXPERTS

    def __call__(self, rows_RH: paddle.Tensor, counts: np.ndarray) -> paddle.Tensor:
        return rows_RH * paddle.to_tensor(np.repeat(np.arange(1.0, EXPERTS + 1), counts)[:, None], rows_RH.dtype)


def run(x, weights, grads, frozen=False):
    x, weights = (paddle.to_tensor(array, "float32", stop_gradient=False) for array in (x, weights))
    weights.stop_gradient = frozen
    sums = LOCAL_DISPATCHER(x, weights, CHOSEN, Scaling())
    sums.backward(paddle.to_tensor(grads, "float32"))
    return [sums.numpy(), x.grad.numpy()] + ([] if frozen else [weights.grad.numpy()])


@pytest.mark.parametrize("frozen", [False, True])
def test_kernels_compute_what_paddle_does(frozen, monkeypatch, native_kernels):
    x, weights, grads = RNG.standard_normal((TOKENS, SIZE)), RNG.random((TOKENS, EACH)), RNG.random((TOKENS, SIZE))
    found = run(x, weights, grads, frozen)
    expected = ((weights * (CHOSEN + 1))[..., None] * x[:, None]).sum(1)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    monkeypatch.setattr(native, "computes", lambda *_: False)
    monkeypatch.setattr(dispatch, "_over_routes", None)
    for ours, theirs in zip(found, run(x, weights, grads, frozen), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_groups_of_rows_are_views_and_their_gradients_come_together():
    rows = paddle.to_tensor(RNG.standard_normal((6, 4)), stop_gradient=False)
    groups = experts._Split.apply(rows, [2, 0, 3, 1])
    assert [group.shape[0] for group in groups] == [2, 0, 3, 1]
    assert groups[2].data_ptr() == rows.data_ptr() + 2 * 4 * 8
    joined = experts._Join.apply(*(group * (i + 1) for i, group in enumerate(groups)))
    joined.sum().backward()
    assert rows.grad.numpy()[:, 0].tolist() == [1, 1, 3, 3, 3, 4]


def test_a_group_without_a_gradient_gets_none():
    groups = [paddle.ones([2, 3]), paddle.ones([1, 3])]
    groups[1].stop_gradient = False
    experts._Join.apply(*groups).sum().backward()
    assert groups[0].grad is None and groups[1].grad.numpy().tolist() == [[1.0] * 3]
