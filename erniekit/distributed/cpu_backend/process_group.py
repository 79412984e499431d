"""A process group of CPU ranks over mailboxes, with the interface that `paddle.distributed` and fleet need.

Why not Paddle's ProcessGroupGloo, patched (measured with 3.3.1): it lacks reduce_scatter, all-to-all, AVG, partial
operations and every `*_on_calc_stream` method; its groups overwrite each other's keys in the store while they form; its
send waits for the receiver and its tags count every operation of a group, so batches of sends and receives hang; it
aborts when one rank is 30 s late; and its float16 sums are infinite. Nothing of it would remain unpatched.

Reductions add in order of ranks, whatever the size, so every rank and every run get the same bits. Names and argument
orders are those of Paddle's pybind class, which its Python code calls: `out` comes first, except in the two-argument
form of `all_gather`. With `sync_op` False operations still complete at once, except receiving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from paddle import Tensor
from paddle.base.core import ReduceOp

from erniekit.distributed.cpu_backend.mailboxes import Mailboxes
from erniekit.distributed.cpu_backend.memory import read, read_numbers, write, write_numbers

COLLECTIVE, POINT_TO_POINT = 0, 1  # kinds of messages in a group, which may run ahead of each other
SMALL_REDUCE_BYTES = 1 << 15  # below this, every rank sends everything: one exchange instead of two
COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PRODUCT: np.multiply,
}


class CompletedTask:
    """The task of an operation that is complete when its method returns."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


COMPLETED_TASK = CompletedTask()


class ReceiveTask:
    """The task of a posted receive. Receives from one sender are filled in the order in which they were posted."""

    def __init__(self, queue: deque[ReceiveTask], fill: Callable[[], None]) -> None:
        self._queue = queue
        self._fill = fill
        self._done = False
        queue.append(self)

    def wait(self, timeout: object = None) -> bool:
        while not self._done:
            first = self._queue.popleft()
            first._fill()
            first._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self.wait()


class SocketProcessGroup:
    """Replaces `core.ProcessGroup`.

    Args:
        mailboxes: this rank's connections.
        group_id: the same number on all members.
        rank: this rank's index in the group.
        ranks: returns the members' global ranks in order; called at the first use, since Paddle creates its Group
            later.
    """

    def __init__(self, mailboxes: Mailboxes, group_id: int, rank: int, ranks: Callable[[], Sequence[int]]) -> None:
        self._mailboxes = mailboxes
        self._id = group_id
        self._rank = rank
        self._ranks = ranks
        self._posted: dict[int, deque[ReceiveTask]] = {}  # sender -> receives not filled yet
        self._coalesced: list[ReceiveTask] | None = None  # receives postponed until the end of a batch

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self._ranks())

    def name(self) -> str:
        return "GLOO"  # the name by which paddle recognises CPU groups

    # Reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, sync_op: bool = True) -> CompletedTask:
        numbers = read_numbers(tensor)
        if numbers.nbytes <= SMALL_REDUCE_BYTES:
            write_numbers(tensor, self._reduce_scatter([numbers] * self.size(), op))
        else:
            local = self._reduce_scatter(_split(numbers, _even_sizes(numbers.size, self.size())), op)
            pieces = self._all_to_all([local.view(np.uint8)] * self.size())
            write_numbers(tensor, np.concatenate(pieces).view(local.dtype))
        return COMPLETED_TASK

    def reduce(self, tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, sync_op: bool = True) -> CompletedTask:
        numbers = read_numbers(tensor)
        received = self._gather_to(dst, numbers.view(np.uint8))
        if received:
            write_numbers(tensor, _combine([part.view(numbers.dtype) for part in received], op))
        return COMPLETED_TASK

    def reduce_scatter_tensor(
        self, out: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, sync_op: bool = True
    ) -> CompletedTask:
        numbers = read_numbers(tensor)
        write_numbers(out, self._reduce_scatter(_split(numbers, _even_sizes(numbers.size, self.size())), op))
        return COMPLETED_TASK

    def reduce_scatter(
        self, out: Tensor, tensors: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, sync_op: bool = True
    ) -> CompletedTask:
        write_numbers(out, self._reduce_scatter([read_numbers(tensor) for tensor in tensors], op))
        return COMPLETED_TASK

    # Moving data

    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = True) -> CompletedTask:
        received = self._scatter_from(src, [read(tensor)] * self.size() if src == self._rank else None)
        if src != self._rank:
            write(tensor, received)
        return COMPLETED_TASK

    def scatter(self, out: Tensor, tensors: Sequence[Tensor], src: int, sync_op: bool = True) -> CompletedTask:
        write(out, self._scatter_from(src, [read(tensor) for tensor in tensors] if src == self._rank else None))
        return COMPLETED_TASK

    def scatter_tensor(self, out: Tensor, tensor: Tensor, src: int, sync_op: bool = True) -> CompletedTask:
        pieces = np.split(read(tensor), self.size()) if src == self._rank else None
        write(out, self._scatter_from(src, pieces))
        return COMPLETED_TASK

    def gather(
        self, tensor: Tensor, outs: Sequence[Tensor], dst: int, sync_op: bool = True, use_calc_stream: bool = False
    ) -> CompletedTask:
        for out, part in zip(outs or (), self._gather_to(dst, read(tensor)), strict=False):
            write(out, part)
        return COMPLETED_TASK

    def all_gather(self, first: object, second: object, sync_op: bool | None = None) -> CompletedTask:
        """All-gather `(outs, tensor, sync_op)`, or `(tensor, out)` as fleet's sequence parallelism and sharding call
        it."""
        outs, tensor = (second, first) if sync_op is None else (first, second)
        parts = self._all_to_all([read(tensor)] * self.size())
        if isinstance(outs, (list, tuple)) and len(outs) > 1:
            for out, part in zip(outs, parts, strict=True):
                write(out, part)
        else:
            write(outs[0] if isinstance(outs, (list, tuple)) else outs, np.concatenate(parts))
        return COMPLETED_TASK

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, sync_op: bool = True) -> CompletedTask:
        write(out, np.concatenate(self._all_to_all([read(tensor)] * self.size())))
        return COMPLETED_TASK

    def all_gather_partial(self, out: Tensor, tensor: Tensor, num: int, id: int, sync_op: bool = True) -> CompletedTask:
        """Gather chunk `id` of `num` of each rank's tensor; together they make up `out`, which may be `tensor`."""
        write(out, np.concatenate(self._all_to_all([np.split(read(tensor), num)[id]] * self.size())))
        return COMPLETED_TASK

    def all_to_all(self, outs: Sequence[Tensor], tensors: Sequence[Tensor], sync_op: bool = True) -> CompletedTask:
        for out, part in zip(outs, self._all_to_all([read(tensor) for tensor in tensors]), strict=True):
            write(out, part)
        return COMPLETED_TASK

    def all_to_all_tensor(self, out: Tensor, tensor: Tensor, sync_op: bool = True) -> CompletedTask:
        write(out, np.concatenate(self._all_to_all(np.split(read(tensor), self.size()))))
        return COMPLETED_TASK

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        out_sizes: Sequence[int] | None = None,
        in_sizes: Sequence[int] | None = None,
        sync_op: bool = True,
    ) -> CompletedTask:
        """Exchange rows of axis 0; `in_sizes` are the rows that go to each rank, by default equally many."""
        rows = tensor.shape[0]
        sizes = list(in_sizes) if in_sizes else _even_sizes(rows, self.size())
        data = read(tensor)
        row = data.nbytes // rows if rows else 0
        write(out, np.concatenate(self._all_to_all(_split(data, [size * row for size in sizes]))))
        return COMPLETED_TASK

    def barrier(self, device_id: int = -1) -> CompletedTask:
        self._all_to_all([np.empty(0, np.uint8)] * self.size())
        return COMPLETED_TASK

    # Point to point

    def send(self, tensor: Tensor, dst: int, sync_op: bool = True) -> CompletedTask:
        self._send(dst, POINT_TO_POINT, read(tensor))
        return COMPLETED_TASK

    def recv(self, tensor: Tensor, src: int, sync_op: bool = True) -> ReceiveTask:
        return self._post(src, lambda: write(tensor, self._receive(src, POINT_TO_POINT)), sync_op)

    def send_partial(self, tensor: Tensor, dst: int, num: int, id: int, sync_op: bool = True) -> CompletedTask:
        self._send(dst, POINT_TO_POINT, np.split(read(tensor), num)[id])
        return COMPLETED_TASK

    def recv_partial(self, tensor: Tensor, src: int, num: int, id: int, sync_op: bool = True) -> ReceiveTask:
        def fill() -> None:
            full = read(tensor)  # the tensor's memory, or a copy if the tensor is not contiguous
            np.split(full, num)[id][:] = self._receive(src, POINT_TO_POINT)
            write(tensor, full)

        return self._post(src, fill, sync_op)

    def _start_coalescing(self) -> None:
        """Begin a batch, in which a receive may be posted before the send that it answers."""
        self._coalesced = []

    def _end_coalescing(self, tasks: object = None) -> None:
        batch, self._coalesced = self._coalesced or [], None
        for task in batch:
            task.wait()

    def _post(self, src: int, fill: Callable[[], None], sync_op: bool) -> ReceiveTask:
        task = ReceiveTask(self._posted.setdefault(src, deque()), fill)
        if self._coalesced is not None:
            self._coalesced.append(task)
        elif sync_op:
            task.wait()
        return task

    # The variants for a GPU's compute stream; a CPU has one stream.

    all_reduce_on_calc_stream = all_reduce
    reduce_on_calc_stream = reduce
    reduce_scatter_on_calc_stream = reduce_scatter
    reduce_scatter_tensor_on_calc_stream = reduce_scatter_tensor
    broadcast_on_calc_stream = broadcast
    scatter_on_calc_stream = scatter
    scatter_tensor_on_calc_stream = scatter_tensor
    all_gather_into_tensor_on_calc_stream = all_gather_into_tensor
    all_gather_partial_on_calc_stream = all_gather_partial
    all_to_all_on_calc_stream = all_to_all
    all_to_all_tensor_on_calc_stream = all_to_all_tensor
    all_to_all_single_on_calc_stream = all_to_all_single
    send_on_calc_stream = send
    recv_on_calc_stream = recv
    send_partial_on_calc_stream = send_partial
    recv_partial_on_calc_stream = recv_partial

    def all_gather_on_calc_stream(self, outs: Sequence[Tensor], tensor: Tensor) -> CompletedTask:
        return self.all_gather(outs, tensor, True)

    # Bytes

    def _reduce_scatter(self, pieces: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
        """Send a piece to each member and return the reduction of those received."""
        dtype = pieces[self._rank].dtype
        received = self._all_to_all([piece.view(np.uint8) for piece in pieces])
        return _combine([part.view(dtype) for part in received], op)

    def _all_to_all(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send `pieces[i]` to member i and return what the members have sent, in order of members."""
        size = self.size()
        for step in range(1, size):
            to = (self._rank + step) % size
            self._send(to, COLLECTIVE, pieces[to])
        received = list(pieces)
        for step in range(1, size):
            source = (self._rank - step) % size
            received[source] = self._receive(source, COLLECTIVE)
        return received

    def _gather_to(self, dst: int, data: np.ndarray) -> list[np.ndarray]:
        """Return all members' bytes on member `dst`, and an empty list elsewhere."""
        if self._rank != dst:
            self._send(dst, COLLECTIVE, data)
            return []
        return [data if member == dst else self._receive(member, COLLECTIVE) for member in range(self.size())]

    def _scatter_from(self, src: int, pieces: Sequence[np.ndarray] | None) -> np.ndarray:
        """Send one of `pieces` from member `src` to each member; return this member's piece."""
        if pieces is None:
            return self._receive(src, COLLECTIVE)
        for member, piece in enumerate(pieces):
            if member != src:
                self._send(member, COLLECTIVE, piece)
        return pieces[src]

    def _send(self, member: int, kind: int, data: np.ndarray) -> None:
        self._mailboxes.send(self._ranks()[member], (self._id, kind), data.data)

    def _receive(self, member: int, kind: int) -> np.ndarray:
        return self._mailboxes.receive(self._ranks()[member], (self._id, kind))


def _combine(parts: Sequence[np.ndarray], op: ReduceOp) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        COMBINE[op](total, part, out=total)
    if op == ReduceOp.AVG:
        np.divide(total, len(parts), out=total, casting="unsafe")  # integers are rounded towards zero
    return total


def _even_sizes(total: int, parts: int) -> list[int]:
    """Return the sizes of nearly equal parts."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _split(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, list(accumulate(sizes))[:-1])
