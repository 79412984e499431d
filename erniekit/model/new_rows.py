"""Rows of new tokens beside a frozen embedding or head: a parameter R [n, H] that stands for rows of W [V, H].

Only R has a gradient and states of the optimizer. Every tensor-parallel rank has all of R and uses the rows whose
places lie in its shard of W, so a rank's gradient of R is a part of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from erniekit.model import autograd, bf16
from erniekit.model.autograd import filter_gradients, needs_grad


class NewRows(NamedTuple):
    """Rows [start, stop) of this rank's W are rows [offset, offset + stop - start) of `values`; start = stop: none."""

    values: Tensor
    start: int
    stop: int
    offset: int

    @property
    def here(self) -> slice:
        """The rows of `values` that have a place in this rank's W."""
        return slice(self.offset, self.offset + self.stop - self.start)

    def local(self) -> Tensor:
        """Return these rows."""
        return self.values[self.here]


def place_rows(values: Tensor, first: int, rank: int, width: int) -> NewRows:
    """Return the place of new rows in a rank's shard of W.

    Args:
        first: the id of the first new token.
        width: the rows of the shard.
    """
    start = min(max(first - rank * width, 0), width)
    stop = min(max(first + values.shape[0] - rank * width, start), width)
    return NewRows(values, start, stop, max(0, rank * width - first) if stop > start else 0)


def look_up(rows: NewRows, local_ids: Tensor, found: Tensor) -> Tensor:
    """Replace in `found` [..., H] the embeddings of new tokens.

    Args:
        local_ids: int64 [...], ids counted from the first row of this rank's W; those outside of it are not new.
    """
    is_new = (local_ids >= rows.start) & (local_ids < rows.stop)
    numbers = paddle.where(is_new, local_ids - rows.start + rows.offset, paddle.zeros_like(local_ids))
    return paddle.where(is_new.unsqueeze(-1), F.embedding(numbers, rows.values), found)


def grown_logits(hidden: Tensor, weight: Tensor, rows: NewRows) -> Tensor:
    """Return hidden W^T with the logits of new tokens from R; [..., H] -> [..., V]. W gets no gradient."""
    return autograd.apply(_GrownLogits, hidden, weight, rows.values, rows.start, rows.stop, rows.offset)


class _GrownLogits(PyLayer):
    """dhidden = dlogits W' with the grown W'; dR = dlogits^T hidden of R's columns."""

    @staticmethod
    def forward(ctx, hidden, weight, values, start, stop, offset):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, weight, values)
        ctx.place, ctx.products = (start, stop, offset), bf16.enabled()
        ctx.needs_input_grad = needs_grad(hidden, weight, values)
        return logits_of(hidden, weight, NewRows(values, start, stop, offset))

    @staticmethod
    @bf16.as_in_forward
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        hidden, weight, values = ctx.saved_tensor()
        rows = NewRows(values, *ctx.place)
        for_hidden, _, for_rows = ctx.needs_input_grad
        grad_rows = None
        if for_rows:
            grad_rows = paddle.zeros_like(values)
            add_rows_gradient(grad_rows, rows, grad.flatten(0, -2), hidden.flatten(0, -2))
        grad_hidden = hidden_gradient(grad, weight, rows) if for_hidden else None
        return filter_gradients((grad_hidden, None, grad_rows), (for_hidden, False, for_rows))


# The same pieces without autograd, for functions that compute their own gradients.


def logits_of(hidden: Tensor, weight: Tensor, rows: NewRows | None) -> Tensor:
    """Return hidden W'^T; without new rows, or without any here, W' is W."""
    logits = bf16.head_matmul(hidden, weight, transpose_y=True)
    if rows is not None and rows.stop > rows.start:
        logits[..., rows.start : rows.stop] = bf16.head_matmul(hidden, rows.local(), transpose_y=True)
    return logits


def hidden_gradient(grad: Tensor, weight: Tensor, rows: NewRows | None) -> Tensor:
    """Return grad W' for a gradient of the logits [..., V]."""
    if rows is None or rows.stop == rows.start:
        return bf16.head_matmul(grad, weight)
    total = bf16.head_matmul(grad[..., rows.start : rows.stop], rows.local())
    for start, stop in ((0, rows.start), (rows.stop, weight.shape[0])):
        if stop > start:
            total = total + bf16.head_matmul(grad[..., start:stop], weight[start:stop])
    return total


def add_rows_gradient(total: Tensor, rows: NewRows, grad_TV: Tensor, hidden_TH: Tensor) -> None:
    """Add in place the gradient of R, grad^T hidden of its columns."""
    if rows.stop > rows.start:
        own = bf16.head_matmul(grad_TV[:, rows.start : rows.stop], hidden_TH, transpose_x=True)
        total[rows.here] = total[rows.here] + own
