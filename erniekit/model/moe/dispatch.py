"""How tokens reach their experts, which may be on other ranks, and how what the experts make of them comes back.

Every way gives the same: for each token the sum over its experts of weight * expert(token).
Shapes: T tokens of this rank, K experts for each, H hidden size, E experts, M members of a group, R rows; a row is a
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

from erniekit.model.moe.all_to_all import AllGather, AllToAll, Replicated, all_gather_counts, require_grad


class LocalExperts(Protocol):
    """Those of a layer's experts that this rank has.

    Attributes:
        numbers: which, of `total`.
    """

    numbers: range
    total: int

    def __call__(self, rows_RH: paddle.Tensor, counts: np.ndarray) -> paddle.Tensor:
        """Rows, those of one expert side by side, `counts[i]` for the i-th expert held -> what it makes of each."""
        ...


class TokenDispatcher(Protocol):
    """A way of tokens to experts.

    Attributes:
        group: the ranks that divide the experts; None: each has all of them.
        run_all_experts: whether every expert runs, also without a row, so that all ranks do the same: hooks of
        fleet's wait for
            each parameter's gradient, and some gather a parameter just before it is used.
    """

    @property
    def group(self) -> Group | None: ...

    @property
    def run_all_experts(self) -> bool: ...

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        """The sums [T, H]. Weights have the dtype of x."""
        ...


def local_expert_ids(total: int, group: Group | None) -> range:
    """The experts of this rank: members of a group have equally many, in order."""
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
        rows = _gather(require_grad(x_TH) if self.run_all_experts else x_TH, order // experts_TK.shape[1])
        outputs = local_experts(rows, counts_E)
        return _weighted_sums(outputs, order, weights_TK)


LOCAL_DISPATCHER = LocalDispatcher()


@dataclass(frozen=True)
class ExpertParallel:
    """The other ranks, as layers of experts meet them.

    Attributes:
        dispatch: how tokens reach experts.
        all_reduce_loads: adds an array up over the ranks that have other tokens of a step.
    """

    dispatcher: TokenDispatcher = LOCAL_DISPATCHER
    all_reduce_loads: Callable[[np.ndarray], np.ndarray] = lambda loads: loads


NO_EXPERT_PARALLEL = ExpertParallel()


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Each member has tokens of its own; their rows go to the experts' members, and back, by all-to-all.

    Attributes:
        padded: transfers between all pairs of members are padded to the largest.
    """

    group: Group
    padded: bool = False
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"{self.group.nranks} parts of the experts, rows travel by all-to-all{', padded' * self.padded}"

    def __call__(
        self, x_TH: paddle.Tensor, weights_TK: paddle.Tensor, experts_TK: np.ndarray, local_experts: LocalExperts
    ) -> paddle.Tensor:
        order, counts_E = _by_expert(experts_TK, local_experts.total)  # the experts of one member are side by side, too
        members = self.group.nranks
        counts_ME = all_gather_counts(counts_E, self.group)
        all_to_all = AllToAll.of(counts_ME.reshape(members, members, -1).sum(2), self.group, padded=self.padded)
        rows = all_to_all(_gather(x_TH, order // experts_TK.shape[1]))
        # They lie by sender and within by expert; an expert wants its rows of all senders side by side.
        counts_M = counts_ME[:, local_experts.numbers.start : local_experts.numbers.stop]
        by_expert = np.argsort(np.repeat(np.tile(local_experts.numbers, members), counts_M.reshape(-1)), kind="stable")
        outputs = local_experts(_gather(rows, by_expert), counts_M.sum(0))
        outputs = all_to_all.reverse()(_gather(outputs, _inverse(by_expert)))
        return _weighted_sums(outputs, order, weights_TK)


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Each member has tokens of its own; all members see all of them, compute what their experts give, and the sums go
    back. Less moves than by exchange where a token has more experts than the group has members.

    Attributes:
        padded: where members have different numbers of tokens, these are padded to the largest.
    """

    group: Group
    padded: bool = False
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"{self.group.nranks} parts of the experts, tokens travel by all-gather{', padded' * self.padded}"

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
    """Every member has the same tokens already; each computes what its experts give, and the members add up."""

    group: Group
    run_all_experts: bool = True

    def __str__(self) -> str:
        return f"{self.group.nranks} parts of the experts, over tokens that every rank has; sums travel"

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
    """What the held experts give for the tokens of all members, added up over the members; `experts_TK` are of all."""
    x_TH, weights_TK = collective.gather_tokens(x_TH, weights_TK)
    flat, own = experts_TK.reshape(-1), local_experts.numbers
    routes = np.flatnonzero((flat >= own.start) & (flat < own.stop))
    order, counts = _by_expert(flat[routes] - own.start, len(own))
    order = routes[order]
    tokens = order // experts_TK.shape[1]
    outputs = local_experts(_gather(x_TH, tokens), counts) * _gather(weights_TK.reshape([-1, 1]), order)
    return collective.combine(_SumsByToken.apply(outputs, tokens, x_TH.shape[0]))


class _SumsByToken(PyLayer):
    """Rows [R, H] added up by the token that each belongs to: [T, H]. Paddle's index_add lacks a gradient where there
    are no rows and they come back from recomputation."""

    @staticmethod
    def forward(ctx, rows_RH, tokens, count):  # type: ignore[no-untyped-def]
        ctx.tokens = tokens
        sums_TH = paddle.zeros([count, rows_RH.shape[1]], rows_RH.dtype)
        return paddle.index_add(sums_TH, paddle.to_tensor(tokens), 0, rows_RH) if len(tokens) else sums_TH

    @staticmethod
    def backward(ctx, gradient_TH):  # type: ignore[no-untyped-def]
        return _gather(gradient_TH, ctx.tokens)


def _by_expert(experts: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """The order in which routes of one expert lie side by side, and how many each of `total` experts has."""
    flat = experts.reshape(-1)
    return np.argsort(flat, kind="stable"), np.bincount(flat, minlength=total)


def _weighted_sums(outputs_RH: paddle.Tensor, order: np.ndarray, weights_TK: paddle.Tensor) -> paddle.Tensor:
    """The outputs, `outputs_RH[i]` being that of route `order[i]`, weighted and summed for each token."""
    outputs_TKH = _gather(outputs_RH, _inverse(order)).reshape([*weights_TK.shape, outputs_RH.shape[1]])
    return paddle.matmul(weights_TK.unsqueeze(1), outputs_TKH).squeeze(1)


def _inverse(order: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def _gather(rows: paddle.Tensor, indices: np.ndarray) -> paddle.Tensor:
    return paddle.gather(rows, paddle.to_tensor(indices))
