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


def counts_of_all(counts: np.ndarray, group: Group) -> np.ndarray:
    """What every member has counted: int64 [members, n] from this member's [n]."""
    own = paddle.to_tensor(counts.astype(np.int64))
    gathered = paddle.empty([group.nranks * len(counts)], "int64")
    dist.stream.all_gather(gathered, own, group=group)
    return gathered.numpy().reshape(group.nranks, -1)


@dataclass(frozen=True)
class Exchange:
    """All-to-all: each row goes to one member.

    Attributes:
        sent: how many rows this member sends to each member; they lie in order of members.
        received: how many it receives from each.
        block: None: transfers are as long as they need to be; otherwise all are padded to this many rows, which must
            be the same on all members and enough for all.
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    block: int | None = None

    @classmethod
    def of(cls, rows_MM: np.ndarray, group: Group, *, padded: bool = False) -> Exchange:
        """From the number of rows that each member (axis 0) has for each member (axis 1)."""
        sent, received = rows_MM[group.rank].tolist(), rows_MM[:, group.rank].tolist()
        return cls(group, tuple(sent), tuple(received), int(rows_MM.max()) if padded else None)

    def back(self) -> Exchange:
        """The way of what was made of the received rows to those who had sent them."""
        return replace(self, sent=self.received, received=self.sent)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [sum of sent, H] -> those received [sum of received, H], in order of members."""
        return _Exchange.apply(asking(rows), self)

    def _moved(self, rows: Tensor) -> Tensor:
        if self.block is None:
            out = paddle.empty([sum(self.received), *rows.shape[1:]], rows.dtype)
            dist.alltoall_single(out, rows.contiguous(), list(self.sent), list(self.received), group=self.group)
            return out
        if self.block == 0:
            return paddle.assign(rows)
        padded = _padded(rows, self.sent, self.block)
        out = paddle.empty_like(padded)
        dist.alltoall_single(out, padded, group=self.group)
        return _stripped(out, self.received, self.block)


@dataclass(frozen=True)
class Gathering:
    """All-gather: every member sees the rows of all, in order of members, and gets the sum of what all made of its own.

    Attributes:
        rows: how many rows each member has.
        padded: where these differ, pad them to the largest in one transfer, instead of one transfer for each member.
    """

    group: Group
    rows: tuple[int, ...]
    padded: bool = False

    def to_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of each tensor [own rows, ...] those of all members; gradients of all members add up on the rows' owner."""
        return tuple(_ToAll.apply(self, *map(asking, tensors)))

    def home(self, rows: Tensor) -> Tensor:
        """Sums over the members [rows of all, ...] -> this member's own; the gradient goes to all."""
        return _Home.apply(asking(rows), self)

    def collected(self, rows: Tensor) -> Tensor:
        """The rows of all members, without a gradient."""
        if self._in_one:
            padded = _padded(rows, [rows.shape[0]], self._block)
            out = paddle.empty([padded.shape[0] * self.group.nranks, *rows.shape[1:]], rows.dtype)
            if self._block:
                dist.stream.all_gather(out, padded, group=self.group)
            return _stripped(out, self.rows, self._block)
        parts = []
        for member, count in enumerate(self.rows):
            own = member == self.group.rank
            part = rows.contiguous() if own else paddle.empty([count, *rows.shape[1:]], rows.dtype)
            dist.broadcast(part, src=self.group.ranks[member], group=self.group)
            parts.append(part)
        return paddle.concat(parts)

    def summed(self, rows: Tensor) -> Tensor:
        """The sum over all members, this member's own rows of it, without a gradient."""
        if self._in_one:
            padded = _padded(rows, self.rows, self._block)
            out = paddle.empty([self._block, *rows.shape[1:]], rows.dtype)
            if self._block:
                dist.stream.reduce_scatter(out, padded, group=self.group)
            return out[: self.rows[self.group.rank]]
        parts = [paddle.assign(part) for part in paddle.split(rows, list(self.rows))]  # they are added to in place
        for member, part in enumerate(parts):
            dist.reduce(part, dst=self.group.ranks[member], group=self.group)
        return parts[self.group.rank]

    @property
    def _in_one(self) -> bool:
        return self.padded or len(set(self.rows)) == 1

    @property
    def _block(self) -> int:
        return max(self.rows)


@dataclass(frozen=True)
class Replicas:
    """Every member has all rows already, the same ones: nothing travels but sums."""

    group: Group

    def to_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors as they are; the gradients of all members add up."""
        return tuple(_ToAll.apply(self, *map(asking, tensors)))

    def home(self, rows: Tensor) -> Tensor:
        """The sum over the members; its gradient, the same on all members, is that of each summand: nothing travels."""
        return _Home.apply(rows, self)

    def collected(self, rows: Tensor) -> Tensor:
        return paddle.assign(rows)

    def summed(self, rows: Tensor) -> Tensor:
        total = paddle.assign(rows)
        dist.all_reduce(total, group=self.group)
        return total


def one_after_the_other(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both unchanged; in backward nothing before `second` runs until all after `first` has run.

    The order of two branches in backward depends on their depths, and these on what a member holds (an adapter beside
    some expert). Where both call collectives, all members must call them in one order.
    """
    return tuple(_Together.apply(asking(first), asking(second)))


class _Exchange(PyLayer):
    @staticmethod
    def forward(ctx, rows, exchange):  # type: ignore[no-untyped-def]
        ctx.exchange = exchange
        return exchange._moved(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.exchange.back()._moved(gradient)


class _ToAll(PyLayer):
    """Several tensors at once, so that their gradients travel in one order on all members."""

    @staticmethod
    def forward(ctx, way, *tensors):  # type: ignore[no-untyped-def]
        ctx.way = way
        return tuple(way.collected(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return tuple(ctx.way.summed(gradient) for gradient in gradients)


class _Home(PyLayer):
    @staticmethod
    def forward(ctx, rows, way):  # type: ignore[no-untyped-def]
        ctx.way = way
        return way.summed(rows)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.way.collected(gradient)


class _Together(PyLayer):
    @staticmethod
    def forward(ctx, *tensors):  # type: ignore[no-untyped-def]
        return tuple(paddle.assign(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return tuple(paddle.assign(gradient) for gradient in gradients)


def asking(x: Tensor) -> Tensor:
    """x, in training as a tensor that asks for a gradient: then its backward pass takes place on every member.

    (A product with no rows must have it, too: Paddle fails where only the other factor's gradient is wanted.)
    """
    if not paddle.is_grad_enabled() or not x.stop_gradient:
        return x
    x = x.detach()
    x.stop_gradient = False
    return x


def _padded(rows: Tensor, counts: Sequence[int], block: int) -> Tensor:
    """Consecutive parts of `counts` rows, each followed by zeros up to `block` rows."""
    parts = paddle.split(rows, list(counts)) if len(counts) > 1 else [rows]
    shape = rows.shape[1:]
    pieces = [
        piece
        for part, count in zip(parts, counts, strict=True)
        for piece in ([part, paddle.zeros([block - count, *shape], rows.dtype)] if count < block else [part])
    ]
    return paddle.concat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


def _stripped(rows: Tensor, counts: Sequence[int], block: int) -> Tensor:
    """The inverse of `_padded`."""
    if all(count == block for count in counts):
        return rows
    return paddle.concat([rows[start * block : start * block + count] for start, count in enumerate(counts)])
