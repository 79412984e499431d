"""Dispatch tokens to their experts, which may be on other ranks, and combine the experts' outputs.

All dispatchers compute the same: for each token the sum over its experts of weight * expert(token).
Shapes: T tokens of this rank, K experts per token, H hidden size, E experts, M members of a group, R rows; a row is a
token on its way to one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import paddle
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group

from erniekit.model import native
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.moe.all_to_all import AllGather, AllToAll, Replicated, all_gather_counts, require_grad

ROUTES = "lllpppp"  # the arguments of the kernels between tokens and their rows


class LocalExperts(Protocol):
    """The experts of a layer that this rank has.

    Attributes:
        numbers: their indices among all `total` experts.
    """

    numbers: range
    total: int

    def __call__(self, rows_RH: paddle.Tensor, counts: np.ndarray) -> paddle.Tensor:
        """Run each local expert on its rows; rows are sorted by expert, `counts[i]` of them for the
        i-th local expert."""
        ...


class TokenDispatcher(Protocol):
    """A way to bring tokens to experts.

    Attributes:
        group: the ranks that shard the experts; None: each has all of them.
        run_all_experts: run every expert, also without rows, so that all ranks do the same: fleet's hooks wait for
            each parameter's gradient, and some gather a parameter just before it is used.
    """

    @property
    def group(self) -> Group | None: ...

    @property
    def run_all_experts(self) -> bool: ...

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        """Return the weighted sums [T, H]. Weights have the dtype of x."""
        ...


def local_expert_ids(total: int, group: Group | None) -> range:
    """Return the experts of this rank: each member of a group has the same number, in order."""
    if group is None:
        return range(total)
    assert total % group.nranks == 0  # checked with the topology
    each = total // group.nranks
    return range(group.rank * each, (group.rank + 1) * each)


@dataclass(frozen=True)
class LocalDispatcher:
    """Every rank has all experts."""

    run_all_experts: bool = False
    group: None = None

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        order, counts_E = _by_expert(experts_TK, local_experts.total)
        x_TH = require_grad(x_TH) if self.run_all_experts else x_TH
        rows = _rows_of_tokens(x_TH, order, experts_TK.shape[1])
        outputs = local_experts(rows, counts_E)
        return _weighted_sums(outputs, order, weights_TK)


LOCAL_DISPATCHER = LocalDispatcher()


@dataclass(frozen=True)
class ExpertParallel:
    """The other ranks, from the point of view of a layer of experts.

    Attributes:
        dispatcher: brings tokens to experts.
        all_reduce_loads: sums an array over the ranks that have other tokens of a step.
    """

    dispatcher: TokenDispatcher = LOCAL_DISPATCHER
    all_reduce_loads: Callable[[np.ndarray], np.ndarray] = lambda loads: loads


NO_EXPERT_PARALLEL = ExpertParallel()


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Each member has other tokens; rows go to the members with their experts, and back, by all-to-all.

    Attributes:
        padded: transfers between all pairs of members are padded to the largest.
    """

    group: Group
    padded: bool = False
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"degree {self.group.nranks}, all-to-all dispatch{', padded' * self.padded}"

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        order, counts_E = _by_expert(experts_TK, local_experts.total)  # the experts of one member are contiguous, too
        members = self.group.nranks
        counts_ME = all_gather_counts(counts_E, self.group)
        all_to_all = AllToAll.of(counts_ME.reshape(members, members, -1).sum(2), self.group, padded=self.padded)
        rows = all_to_all(_rows_of_tokens(x_TH, order, experts_TK.shape[1]))
        # Rows are ordered by sender, then by expert; an expert needs the rows of all senders to be contiguous.
        counts_M = counts_ME[:, local_experts.numbers.start : local_experts.numbers.stop]
        by_expert = np.argsort(np.repeat(np.tile(local_experts.numbers, members), counts_M.reshape(-1)), kind="stable")
        outputs = local_experts(_gather(rows, by_expert), counts_M.sum(0))
        outputs = all_to_all.reverse()(_gather(outputs, _inverse(by_expert)))
        return _weighted_sums(outputs, order, weights_TK)


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Each member has other tokens; all members gather all of them, run their experts, and send back the sums. This
    moves less than all-to-all if a token has more experts than the group has members.

    Attributes:
        padded: if members have different numbers of tokens, pad them to the largest.
    """

    group: Group
    padded: bool = False
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"degree {self.group.nranks}, all-gather dispatch{', padded' * self.padded}"

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        tokens_M = all_gather_counts(np.array([len(experts_TK)]), self.group)[:, 0]
        collective = AllGather(self.group, tuple(tokens_M.tolist()), self.padded)
        return _sum_local_experts(
            collective, x_TH, weights_TK, collective.gather_rows(paddle.to_tensor(experts_TK)).numpy(), local_experts
        )


@dataclass(frozen=True)
class AllReduceDispatcher:
    """Every member has the same tokens; each runs its experts, and the outputs are all-reduced."""

    group: Group
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"degree {self.group.nranks}, all-reduce over the same tokens"

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        return _sum_local_experts(Replicated(self.group), x_TH, weights_TK, experts_TK, local_experts)


def _sum_local_experts(
    collective: AllGather | Replicated,
    x_TH: paddle.Tensor,
    weights_TK: paddle.Tensor,
    experts_TK: np.ndarray,
    local_experts: LocalExperts,
) -> paddle.Tensor:
    """Run the local experts on the tokens of all members and sum the outputs over the members.

    Args:
        experts_TK: the experts of the tokens of all members.
    """
    x_TH, weights_TK = collective.gather_tokens(x_TH, weights_TK)
    flat, own = experts_TK.reshape(-1), local_experts.numbers
    routes = np.flatnonzero((flat >= own.start) & (flat < own.stop))
    order, counts = _by_expert(flat[routes] - own.start, len(own))
    order = routes[order]
    tokens = order // experts_TK.shape[1]
    outputs = local_experts(_gather(x_TH, tokens), counts) * _gather(weights_TK.reshape([-1, 1]), order)
    return collective.combine(_SumsByToken.apply(outputs, tokens, x_TH.shape[0]))


class _SumsByToken(PyLayer):
    """Sums rows [R, H] by token to [T, H]. Paddle's index_add lacks a gradient if there are no rows and recomputation
    restores them."""

    @staticmethod
    def forward(ctx, rows_RH, tokens, count):  # type: ignore[no-untyped-def]
        ctx.tokens = tokens
        sums_TH = paddle.zeros([count, rows_RH.shape[1]], rows_RH.dtype)
        return paddle.index_add(sums_TH, paddle.to_tensor(tokens), 0, rows_RH) if len(tokens) else sums_TH

    @staticmethod
    def backward(ctx, gradient_TH):  # type: ignore[no-untyped-def]
        return _gather(gradient_TH, ctx.tokens)


def _by_expert(experts: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that sorts routes by expert, and the number of routes of each of `total` experts."""
    flat = experts.reshape(-1)
    return np.argsort(flat, kind="stable"), np.bincount(flat, minlength=total)


def _rows_of_tokens(x_TH: paddle.Tensor, order: np.ndarray, experts_per_token: int) -> paddle.Tensor:
    """Return the rows of all routes: row i is that of the token of route `order[i]`."""
    if native.kernel("spread_rows", ROUTES, x_TH) is not None:
        return _SpreadRows.apply(x_TH, _inverse(order).reshape([-1, experts_per_token]))
    return _gather(x_TH, order // experts_per_token)


def _weighted_sums(outputs_RH: paddle.Tensor, order: np.ndarray, weights_TK: paddle.Tensor) -> paddle.Tensor:
    """Weight and sum the outputs of each token; `outputs_RH[i]` belongs to route `order[i]`."""
    if native.kernel("sum_rows", ROUTES, outputs_RH, weights_TK) is not None:
        return _SumRows.apply(outputs_RH, weights_TK, _inverse(order).reshape(weights_TK.shape))
    outputs_TKH = _gather(outputs_RH, _inverse(order)).reshape([*weights_TK.shape, outputs_RH.shape[1]])
    return paddle.matmul(weights_TK.unsqueeze(1), outputs_TKH).squeeze(1)


class _SpreadRows(PyLayer):
    """rows[row_of[t, k]] = x[t] by a native kernel; dx[t] is the sum of the gradients of its rows."""

    @staticmethod
    def forward(ctx, x_TH, row_of_TK):  # type: ignore[no-untyped-def]
        ctx.row_of = row_of_TK
        return _over_routes("spread_rows", row_of_TK, None, x_TH, [row_of_TK.size, x_TH.shape[1]])

    @staticmethod
    def backward(ctx, grad_RH):  # type: ignore[no-untyped-def]
        return _over_routes("sum_rows", ctx.row_of, None, grad_RH, [len(ctx.row_of), grad_RH.shape[1]])


class _SumRows(PyLayer):
    """y[t] = sum over k of w[t, k] rows[row_of[t, k]] by a native kernel. With g the gradient of y the row's is w[t, k]
    g[t], and that of w[t, k] the dot product of g[t] with the row."""

    @staticmethod
    def forward(ctx, rows_RH, weights_TK, row_of_TK):  # type: ignore[no-untyped-def]
        ctx.row_of, ctx.needs_input_grad = row_of_TK, needs_grad(rows_RH, weights_TK)
        ctx.save_for_backward(rows_RH, weights_TK)
        return _over_routes("sum_rows", row_of_TK, weights_TK, rows_RH, [len(row_of_TK), rows_RH.shape[1]])

    @staticmethod
    def backward(ctx, grad_TH):  # type: ignore[no-untyped-def]
        rows_RH, weights_TK = ctx.saved_tensor()
        grad_rows = _over_routes("spread_rows", ctx.row_of, weights_TK, grad_TH, rows_RH.shape)
        grad_weights = _over_routes("row_products", ctx.row_of, grad_TH, rows_RH, weights_TK.shape)
        return filter_gradients((grad_rows, grad_weights), ctx.needs_input_grad)


def _over_routes(
    name: str, row_of_TK: np.ndarray, first: paddle.Tensor | None, second: paddle.Tensor, shape: list[int]
) -> paddle.Tensor:
    """Call a kernel of `native/source/rows.c` with its two float32 inputs."""
    first, second = None if first is None else first.contiguous(), second.contiguous()
    out = paddle.empty(shape, second.dtype)
    kernel = native.kernel(name, ROUTES, second)
    kernel(*row_of_TK.shape, second.shape[1], row_of_TK.ctypes.data, *native.pointers(first, second, out))
    return out


def _inverse(order: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _gather(rows: paddle.Tensor, indices: np.ndarray) -> paddle.Tensor:
    return paddle.gather(rows, paddle.to_tensor(indices))
