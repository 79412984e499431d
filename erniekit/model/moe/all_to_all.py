"""Rows that travel between the ranks of a group, with their gradients: each to the member that wants it and back, or
all of them to every member and their sums back.

Nothing here knows what a row is. Every call below is the same number of collectives on every member, whatever the
number of rows, its own or the others', and so is its backward pass: rows that leave for another member always ask for
a gradient, since whether they need one may depend on what the member holds (`asking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group


def all_gather_counts(counts: np.ndarray, group: Group) -> np.ndarray:
    """What every member has counted: int64 [members, n] from this member's [n]."""
    own = paddle.to_tensor(counts.astype(np.int64))
    gathered = paddle.empty([group.nranks * len(counts)], "int64")
    dist.stream.all_gather(gathered, own, group=group)
    return gathered.numpy().reshape(group.nranks, -1)


@dataclass(frozen=True)
class AllToAll:
    """All-to-all: each row goes to one member.

    Attributes:
        send_counts: how many rows this member sends to each member; they lie in order of members.
        recv_counts: how many it receives from each.
        pad_to: None: transfers are as long as they need to be; otherwise all are padded to this many rows, which must
            be the same on all members and enough for all.
    """

    group: Group
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    pad_to: int | None = None

    @classmethod
    def of(cls, rows_MM: np.ndarray, group: Group, *, padded: bool = False) -> AllToAll:
        """From the number of rows that each member (axis 0) has for each member (axis 1)."""
        send_counts, recv_counts = rows_MM[group.rank].tolist(), rows_MM[:, group.rank].tolist()
        return cls(group, tuple(send_counts), tuple(recv_counts), int(rows_MM.max()) if padded else None)

    def reverse(self) -> AllToAll:
        """The way of what was made of the received rows to those who had sent them."""
        return replace(self, send_counts=self.recv_counts, recv_counts=self.send_counts)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [sum of sent, H] -> those received [sum of received, H], in order of members."""
        return _AllToAll.apply(require_grad(rows), self)

    def _transfer(self, rows: Tensor) -> Tensor:
        if self.pad_to is None:
            out = paddle.empty([sum(self.recv_counts), *rows.shape[1:]], rows.dtype)
            dist.alltoall_single(
                out, rows.contiguous(), list(self.send_counts), list(self.recv_counts), group=self.group
            )
            return out
        if self.pad_to == 0:
            return paddle.assign(rows)
        padded = _pad(rows, self.send_counts, self.pad_to)
        out = paddle.empty_like(padded)
        dist.alltoall_single(out, padded, group=self.group)
        return _unpad(out, self.recv_counts, self.pad_to)


@dataclass(frozen=True)
class AllGather:
    """All-gather: every member sees the rows of all, in order of members, and gets the sum of what all made of its own.

    Attributes:
        rows: how many rows each member has.
        padded: where these differ, pad them to the largest in one transfer, instead of one transfer for each member.
    """

    group: Group
    rows: tuple[int, ...]
    padded: bool = False

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of each tensor [own rows, ...] those of all members; gradients of all members add up on the rows' owner."""
        return tuple(_GatherTokens.apply(self, *map(require_grad, tensors)))

    def combine(self, rows: Tensor) -> Tensor:
        """Sums over the members [rows of all, ...] -> this member's own; the gradient goes to all."""
        return _Combine.apply(require_grad(rows), self)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all members, without a gradient."""
        if self._single_collective:
            padded = _pad(rows, [rows.shape[0]], self._pad_to)
            out = paddle.empty([padded.shape[0] * self.group.nranks, *rows.shape[1:]], rows.dtype)
            if self._pad_to:
                dist.stream.all_gather(out, padded, group=self.group)
            return _unpad(out, self.rows, self._pad_to)
        parts = []
        for member, count in enumerate(self.rows):
            own = member == self.group.rank
            part = rows.contiguous() if own else paddle.empty([count, *rows.shape[1:]], rows.dtype)
            dist.broadcast(part, src=self.group.ranks[member], group=self.group)
            parts.append(part)
        return paddle.concat(parts)

    def reduce_rows(self, rows: Tensor) -> Tensor:
        """The sum over all members, this member's own rows of it, without a gradient."""
        if self._single_collective:
            padded = _pad(rows, self.rows, self._pad_to)
            out = paddle.empty([self._pad_to, *rows.shape[1:]], rows.dtype)
            if self._pad_to:
                dist.stream.reduce_scatter(out, padded, group=self.group)
            return out[: self.rows[self.group.rank]]
        parts = [paddle.assign(part) for part in paddle.split(rows, list(self.rows))]  # they are added to in place
        for member, part in enumerate(parts):
            dist.reduce(part, dst=self.group.ranks[member], group=self.group)
        return parts[self.group.rank]

    @property
    def _single_collective(self) -> bool:
        return self.padded or len(set(self.rows)) == 1

    @property
    def _pad_to(self) -> int:
        return max(self.rows)


@dataclass(frozen=True)
class Replicated:
    """Every member has all rows already, the same ones: nothing travels but sums."""

    group: Group

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors as they are; the gradients of all members add up."""
        return tuple(_GatherTokens.apply(self, *map(require_grad, tensors)))

    def combine(self, rows: Tensor) -> Tensor:
        """The sum over the members; its gradient, the same on all members, is that of each summand: nothing travels."""
        return _Combine.apply(rows, self)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return paddle.assign(rows)

    def reduce_rows(self, rows: Tensor) -> Tensor:
        total = paddle.assign(rows)
        dist.all_reduce(total, group=self.group)
        return total


def order_backward(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both unchanged; in backward nothing before `second` runs until all after `first` has run.

    The order of two branches in backward depends on their depths, and these on what a member holds (an adapter beside
    some expert). Where both call collectives, all members must call them in one order.
    """
    return tuple(_OrderBackward.apply(require_grad(first), require_grad(second)))


class _AllToAll(PyLayer):
    @staticmethod
    def forward(ctx, rows, all_to_all):  # type: ignore[no-untyped-def]
        ctx.all_to_all = all_to_all
        return all_to_all._transfer(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.all_to_all.reverse()._transfer(gradient)


class _GatherTokens(PyLayer):
    """Several tensors at once, so that their gradients travel in one order on all members."""

    @staticmethod
    def forward(ctx, collective, *tensors):  # type: ignore[no-untyped-def]
        ctx.collective = collective
        return tuple(collective.gather_rows(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return tuple(ctx.collective.reduce_rows(gradient) for gradient in gradients)


class _Combine(PyLayer):
    @staticmethod
    def forward(ctx, rows, collective):  # type: ignore[no-untyped-def]
        ctx.collective = collective
        return collective.reduce_rows(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.collective.gather_rows(gradient)


class _OrderBackward(PyLayer):
    @staticmethod
    def forward(ctx, *tensors):  # type: ignore[no-untyped-def]
        return tuple(paddle.assign(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return tuple(paddle.assign(gradient) for gradient in gradients)


def require_grad(x: Tensor) -> Tensor:
    """x, in training as a tensor that asks for a gradient: then its backward pass takes place on every member.

    (A product with no rows must have it, too: Paddle fails where only the other factor's gradient is wanted.)
    """
    if not paddle.is_grad_enabled() or not x.stop_gradient:
        return x
    x = x.detach()
    x.stop_gradient = False
    return x


def _pad(rows: Tensor, counts: Sequence[int], pad_to: int) -> Tensor:
    """Consecutive parts of `counts` rows, each followed by zeros up to `block` rows."""
    parts = paddle.split(rows, list(counts)) if len(counts) > 1 else [rows]
    shape = rows.shape[1:]
    pieces = [
        piece
        for part, count in zip(parts, counts, strict=True)
        for piece in ([part, paddle.zeros([pad_to - count, *shape], rows.dtype)] if count < pad_to else [part])
    ]
    return paddle.concat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


def _unpad(rows: Tensor, counts: Sequence[int], pad_to: int) -> Tensor:
    """The inverse of `_pad`."""
    if all(count == pad_to for count in counts):
        return rows
    return paddle.concat([rows[start * pad_to : start * pad_to + count] for start, count in enumerate(counts)])
