"""Python versions, with gradients, of the tensor-parallel operators that Paddle compiles for GPUs only."""

from __future__ import annotations

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.base.core import ReduceOp
from paddle.distributed import collective

from erniekit.distributed.cpu_backend.process_group import SocketProcessGroup


def c_identity(x: Tensor, ring_id: int, use_calc_stream: bool = True, use_model_parallel: bool = True) -> Tensor:
    """Copy x. (The caller, `c_identity_eager`, sums the gradient over the group.)"""
    return paddle.assign(x)


def c_concat(x: Tensor, rank: int, nranks: int, ring_id: int, *streams: bool) -> Tensor:
    """Concatenate the slices of all ranks on the last axis; the gradient is this rank's slice."""
    return _Concat.apply(x, _process_group(ring_id))


def c_split(x: Tensor, rank: int, nranks: int, ring_id: int, *streams: bool) -> Tensor:
    """Return this rank's slice of the last axis; the gradient is the concatenation of all ranks' gradients."""
    return _Split.apply(x, _process_group(ring_id))


def split_on_last_axis(tensor: Tensor, group: collective.Group, rank: int, nranks: int) -> Tensor:
    """Run `c_split` with the arguments of mp_ops' `c_split_eager.apply`."""
    return _Split.apply(tensor, group.process_group)


def c_softmax_with_cross_entropy(
    logits: Tensor, label: Tensor, ignore_index: int, ring_id: int, rank: int, nranks: int
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of logits whose last axis is sharded over the ranks.

    Args:
        logits: [..., V / nranks], this rank's shard of the vocabulary.
        label: [..., 1], ids in the full vocabulary, the same on every rank.
        ignore_index: positions with this label have loss 0.

    Returns:
        softmax [..., V / nranks] and loss [..., 1], in the dtype of the logits.
    """
    return _CrossEntropy.apply(logits, label, ignore_index, _process_group(ring_id))


def _process_group(ring_id: int) -> SocketProcessGroup:
    return collective._get_group_map()[ring_id].process_group


def _all_gather_last_axis(x: Tensor, group: SocketProcessGroup) -> Tensor:
    slices = [paddle.empty_like(x) for _ in range(group.size())]
    group.all_gather(slices, x, True)
    return paddle.concat(slices, axis=-1)


def _local_slice(x: Tensor, group: SocketProcessGroup) -> Tensor:
    return paddle.split(x, group.size(), axis=-1)[group.rank()].contiguous()


class _Concat(PyLayer):
    @staticmethod
    def forward(ctx, x: Tensor, group: SocketProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _all_gather_last_axis(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return _local_slice(gradient, ctx.group)


class _Split(PyLayer):
    @staticmethod
    def forward(ctx, x: Tensor, group: SocketProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        return _local_slice(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return _all_gather_last_axis(gradient, ctx.group)


class _CrossEntropy(PyLayer):
    """loss = log(sum over all ranks of exp(x - m)) - (x[label] - m), where m is the maximum over all ranks.

    d loss / d x = softmax - 1 at the label.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, logits: Tensor, label: Tensor, ignore_index: int, group: SocketProcessGroup
    ) -> tuple[Tensor, Tensor]:
        x = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        highest = x.max(axis=-1, keepdim=True)
        group.all_reduce(highest, ReduceOp.MAX)
        x = x - highest
        exponentials = x.exp()
        total = exponentials.sum(axis=-1, keepdim=True)
        group.all_reduce(total)

        width = logits.shape[-1]
        position = label.astype("int64") - group.rank() * width
        here = (position >= 0) & (position < width)
        position = paddle.where(here, position, paddle.zeros_like(position))
        here = here.astype(x.dtype)
        at_label = paddle.take_along_axis(x, position, axis=-1) * here
        group.all_reduce(at_label)

        counts = (label != ignore_index).astype(x.dtype)
        loss = (total.log() - at_label) * counts
        softmax = exponentials / total
        ctx.dtype = logits.dtype
        ctx.save_for_backward(softmax, position, here, counts)
        return softmax.astype(logits.dtype), loss.astype(logits.dtype)

    @staticmethod
    def backward(ctx, softmax_gradient: Tensor, loss_gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        softmax, position, here, counts = ctx.saved_tensor()  # the softmax is a second output, without a gradient
        gradient = paddle.put_along_axis(softmax, position, -here, axis=-1, reduce="add")
        return (gradient * (loss_gradient.astype(softmax.dtype) * counts)).astype(ctx.dtype)
