"""Rows that travel, and their gradients, against NumPy: each rank knows what all ranks have."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from erniekit.distributed import cpu_backend
from erniekit.model.moe.all_to_all import AllGather, AllToAll, Replicated, all_gather_counts, order_backward

WIDTH = 3
# How many rows go from each rank (axis 0) to each rank (axis 1), and how many rows each rank has.
EXCHANGES = {
    2: [[[3, 1], [2, 5]], [[0, 0], [2, 4]], [[0, 3], [0, 1]], [[0, 0], [0, 0]], [[2, 2], [2, 2]]],
    4: [[[1, 0, 2, 7], [0, 0, 0, 0], [4, 4, 0, 1], [0, 3, 0, 0]], [[0, 0, 0, 1]] * 4],
}
GATHERINGS = {2: [[4, 4], [5, 2], [0, 3], [0, 0]], 4: [[2, 0, 5, 1], [3, 3, 3, 3], [0, 0, 0, 6]]}


def _group() -> Group:
    cpu_backend.apply()
    dist.init_parallel_env()
    return dist.new_group(list(range(dist.get_world_size())))


def _numbers(name: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(name).standard_normal(shape)


def _leaf(values: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(values, stop_gradient=False)


def _same(tensor: paddle.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-12)


def exchange() -> list[int]:
    """All-to-all there and back. Returns how many rows this rank has received in each case."""
    group = _group()
    tables = [np.array(rows) for rows in EXCHANGES[group.nranks]]
    return [_exchange(group, table, padded) for table in tables for padded in (False, True)]


def _exchange(group: Group, table: np.ndarray, padded: bool) -> int:
    rank, size = group.rank, group.nranks
    np.testing.assert_array_equal(all_gather_counts(table[rank], group), table)
    way = AllToAll.of(table, group, padded=padded)
    rows = [_numbers(r, table[r].sum(), WIDTH) for r in range(size)]

    def towards(values: list[np.ndarray], member: int) -> np.ndarray:
        """What a member receives when each sends it its part of `values`."""
        starts = [table[r, :member].sum() for r in range(size)]
        return np.concatenate(
            [v[s : s + table[r, member]] for r, (v, s) in enumerate(zip(values, starts, strict=True))]
        )

    own = _leaf(rows[rank])
    received = way(own)
    _same(received, towards(rows, rank))
    _same(way.reverse()(received), rows[rank])

    # loss: sum over all ranks of sum(g * received), so the gradient of a row is the g of its place on the other side
    gradients = [_numbers(100 + member, table[:, member].sum(), WIDTH) for member in range(size)]
    (received * paddle.to_tensor(gradients[rank])).sum().backward()
    expected = []
    for member in range(size):
        start = table[:rank, member].sum()
        expected.append(gradients[member][start : start + table[rank, member]])
    _same(own.grad, np.concatenate(expected))
    return received.shape[0]


def gather() -> None:
    """Every member's rows on all members, two tensors at once, and sums back home."""
    group = _group()
    for rows in GATHERINGS[group.nranks]:
        for padded in (False, True):
            _gather(group, rows, padded)


def _gather(group: Group, rows_m: list[int], padded: bool) -> None:
    rank, size = group.rank, group.nranks
    way = AllGather(group, tuple(rows_m), padded)
    rows = [_numbers(r, rows_m[r], WIDTH) for r in range(size)]
    weights = [_numbers(50 + r, rows_m[r]) for r in range(size)]
    ends = np.cumsum(rows_m)
    part = slice(ends[rank] - rows_m[rank], ends[rank])

    own, own_weights = _leaf(rows[rank]), _leaf(weights[rank])
    everyone, all_weights = way.gather_tokens(own, own_weights)
    _same(everyone, np.concatenate(rows))
    _same(all_weights, np.concatenate(weights))
    factors = [_numbers(100 + r, sum(rows_m), WIDTH) for r in range(size)]
    parts = everyone * all_weights.unsqueeze(1) * paddle.to_tensor(factors[rank])
    combine = way.combine(parts)
    product = np.concatenate(rows) * np.concatenate(weights)[:, None]
    _same(combine, (product * sum(factors))[part])

    gradient = _numbers(200, sum(rows_m), WIDTH)  # of the sums of all members
    (combine * paddle.to_tensor(gradient[part])).sum().backward()
    _same(own.grad, (gradient * sum(factors) * np.concatenate(weights)[:, None])[part])
    _same(own_weights.grad, (gradient * sum(factors) * np.concatenate(rows)).sum(1)[part])


def replicas() -> None:
    """The same rows on all members, who each compute a summand."""
    group = _group()
    rank, size = group.rank, group.nranks
    way = Replicated(group)
    rows, factors = _numbers(0, 5, WIDTH), [_numbers(1 + r, 5, WIDTH) for r in range(size)]
    own = _leaf(rows)
    (x,) = way.gather_tokens(own)
    combine = way.combine(x * paddle.to_tensor(factors[rank]))
    _same(combine, rows * sum(factors))
    gradient = _numbers(99, 5, WIDTH)
    (combine * paddle.to_tensor(gradient)).sum().backward()
    _same(own.grad, gradient * sum(factors))  # whole on every member


def two_branches() -> list[str]:
    """Two exchanges there and back, of which one does much more between on rank 0 than elsewhere, and nothing that asks
    for a gradient. Returns the order in which backward reached the branches.
    """
    group = _group()
    way = AllToAll.of(np.ones((group.nranks, group.nranks), np.int64), group)
    depths = {"routed": [60] + [0] * (group.nranks - 1), "shared": [20] * group.nranks}
    reached: list[str] = []

    def branch(name: str, x: paddle.Tensor) -> paddle.Tensor:
        rows = way(x)
        rows.register_hook(lambda gradient: reached.append(name))
        for _ in range(depths[name][group.rank]):
            rows = rows * 1.01
        return way.reverse()(rows)

    x = _leaf(_numbers(group.rank, group.nranks, WIDTH))
    second, routed = order_backward(x, branch("routed", x.detach()))
    (routed + branch("shared", second)).sum().backward()
    _same(x.grad, np.repeat(1.01 ** np.array(depths["shared"])[:, None], WIDTH, axis=1))
    return reached
