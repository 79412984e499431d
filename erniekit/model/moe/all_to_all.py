"""Collectives with gradients that move rows between the ranks of a group: all-to-all, or all-gather and reduce-scatter.

Nothing here knows what a row is. Every call below issues the same number of collectives on every member, whatever their
numbers of rows, and so does its backward pass: rows sent to another member always require a gradient, since whether
they need one may depend on the member's layers (see `require_grad`).
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
    """All-gather the counts of every member: int64 [members, n] from this member's [n]."""
    own = paddle.to_tensor(counts.astype(np.int64))
    gathered = paddle.empty([group.nranks * len(counts)], "int64")
    dist.stream.all_gather(gathered, own, group=group)
    return gathered.numpy().reshape(group.nranks, -1)


@dataclass(frozen=True)
class AllToAll:
    """All-to-all: each row goes to one member.

    Attributes:
        send_counts: number of rows that this member sends to each member; rows are in order of members.
        recv_counts: number of rows that it receives from each.
        pad_to: None: transfers are as long as needed; otherwise all are padded to this many rows, which must be the
            same on all members and enough for all.
    """

    group: Group
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    pad_to: int | None = None

    @classmethod
    def of(cls, rows_MM: np.ndarray, group: Group, *, padded: bool = False) -> AllToAll:
        """Build it from the number of rows that each member (axis 0) has for each member (axis 1)."""
        send_counts, recv_counts = rows_MM[group.rank].tolist(), rows_MM[:, group.rank].tolist()
        return cls(group, tuple(send_counts), tuple(recv_counts), int(rows_MM.max()) if padded else None)

    def reverse(self) -> AllToAll:
        """Return the all-to-all that sends results back to the members that sent the rows."""
        return replace(self, send_counts=self.recv_counts, recv_counts=self.send_counts)

    def __call__(self, rows: Tensor) -> Tensor:
        """Exchange rows: [sum of sent, H] -> [sum of received, H], in order of members."""
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
    """All-gather: every member receives the rows of all, in order of members; the reverse sums over all members.

    Attributes:
        rows: number of rows of each member.
        padded: if these differ, pad them to the largest in one transfer, instead of one transfer for each member.
    """

    group: Group
    rows: tuple[int, ...]
    padded: bool = False

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-gather each tensor [local rows, ...]; gradients are summed over the members at the rows' owner."""
        return tuple(_GatherTokens.apply(self, *map(require_grad, tensors)))

    def combine(self, rows: Tensor) -> Tensor:
        """Sum [rows of all, ...] over the members and return this member's rows; the gradient goes to all members."""
        return _Combine.apply(require_grad(rows), self)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """All-gather rows, without a gradient."""
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
        """Reduce-scatter: sum over all members and return this member's rows, without a gradient."""
        if self._single_collective:
            padded = _pad(rows, self.rows, self._pad_to)
            out = paddle.empty([self._pad_to, *rows.shape[1:]], rows.dtype)
            if self._pad_to:
                dist.stream.reduce_scatter(out, padded, group=self.group)
            return out[: self.rows[self.group.rank]]
        parts = [paddle.assign(part) for part in paddle.split(rows, list(self.rows))]  # reduced in place
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
    """Every member already has the same rows: only sums are communicated."""

    group: Group

    def gather_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors unchanged; gradients are summed over the members."""
        return tuple(_GatherTokens.apply(self, *map(require_grad, tensors)))

    def combine(self, rows: Tensor) -> Tensor:
        """Sum over the members. The gradient is the same on all members and needs no communication."""
        return _Combine.apply(rows, self)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return paddle.assign(rows)

    def reduce_rows(self, rows: Tensor) -> Tensor:
        total = paddle.assign(rows)
        dist.all_reduce(total, group=self.group)
        return total


def order_backward(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return both unchanged; in backward, run everything after `first` before anything before `second`.

    The backward order of two branches depends on their depths, and these on what a member has (for example, an adapter
    on some expert). If both call collectives, all members must call them in the same order.
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
    """Gathers several tensors at once, so that their gradients are communicated in the same order on all members."""

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
    """Return x; in training, as a tensor that requires a gradient, so that its backward pass runs on every member.

    (This is also needed for a product with no rows: Paddle fails if only the other factor needs a gradient.)
    """
    if not paddle.is_grad_enabled() or not x.stop_gradient:
        return x
    x = x.detach()
    x.stop_gradient = False
    return x


def _pad(rows: Tensor, counts: Sequence[int], pad_to: int) -> Tensor:
    """Split rows into consecutive parts of `counts` rows and pad each with zeros to `pad_to` rows."""
    parts = paddle.split(rows, list(counts)) if len(counts) > 1 else [rows]
    shape = rows.shape[1:]
    pieces = [
        piece
        for part, count in zip(parts, counts, strict=True)
        for piece in ([part, paddle.zeros([pad_to - count, *shape], rows.dtype)] if count < pad_to else [part])
    ]
    return paddle.concat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


def _unpad(rows: Tensor, counts: Sequence[int], pad_to: int) -> Tensor:
    """Undo `_pad`."""
    if all(count == pad_to for count in counts):
        return rows
    return paddle.concat([rows[start * pad_to : start * pad_to + count] for start, count in enumerate(counts)])
