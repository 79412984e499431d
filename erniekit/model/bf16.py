"""Products in bfloat16 on a CPU: operands are rounded to bfloat16, sums and outputs are float32 (`native/onednn.py`).

Weights, gradients, norms, softmax and losses stay in float32; what a product keeps for its backward pass is rounded,
half as large. `products` says which products of a block are computed so. A weight is rounded at every use, or once
where `weights_stay` says that none changes. The rules of rounding are those of AVX512-BF16: nearest, ties to even;
numbers below 1.2e-38, the smallest normal one, count as 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.base.framework import EagerParamBase

from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.products import add_product
from erniekit.native import onednn

Result = TypeVar("Result")

# The products there are: of linear layers, those of experts and adapters among them, and of the head.
LINEAR, HEAD = "linear", "head"
PRODUCTS = frozenset({LINEAR, HEAD})

_enabled: ContextVar[frozenset[str]] = ContextVar("bfloat16 products", default=frozenset())
_float32: ContextVar[bool] = ContextVar("all products in float32", default=False)


def is_available() -> tuple[bool, str]:
    """Return whether this processor multiplies bfloat16, and how it does, or why it does not."""
    problem = onednn.problem()
    return (True, f"oneDNN {onednn.version()}, {onednn.instructions()}") if problem is None else (False, problem)


def is_faster() -> tuple[bool, str]:
    """Return whether products in bfloat16 pay here, and why; it measures for 30 ms.

    Rounding takes time, too, so they have to be well faster than those in float32.
    """
    available, text = is_available()
    if not available:
        return False, text
    times = onednn.speedup()
    return times >= onednn.PAYS_FROM, f"{text}: products in bfloat16 at {times:.1f} times the rate of float32"


@contextmanager
def products(enabled: frozenset[str] = PRODUCTS) -> Iterator[None]:
    """Compute these products in bfloat16 inside, and the others in float32; gradients like their forward pass.

    Only float32 tensors on a CPU in eager mode are rounded, so a program that is recorded stays in float32. Where
    `is_available` says no, the rounded operands are multiplied in float32: the same up to the order of sums, but slow.
    """
    token = _enabled.set(frozenset() if _float32.get() else enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


@contextmanager
def float32_products() -> Iterator[None]:
    """Compute all products in float32 inside, whatever a block says: text is generated so, by every kind of step and by
    every command, because bfloat16 does not pay for the few rows of a step."""
    token = _float32.set(True)
    try:
        with products(frozenset()):
            yield
    finally:
        _float32.reset(token)


def computes(product: str, *tensors: Tensor) -> bool:
    """Return whether this product of these tensors is computed in bfloat16 here."""
    if product not in _enabled.get() or not paddle.in_dynamic_mode():
        return False
    return all(tensor.dtype == paddle.float32 and tensor.place.is_cpu_place() for tensor in tensors)


def enabled() -> frozenset[str]:
    """Return the products that are in bfloat16 here."""
    return _enabled.get()


def with_products_of_now(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return `function` with the products that are in bfloat16 here, wherever it is called: recomputation calls a part
    of a block again in the backward pass, outside of the block."""
    here = enabled()
    if not here:
        return function

    def run(*arguments: Any) -> Result:
        with products(here):
            return function(*arguments)

    return run


def as_in_forward(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Let the backward pass of a PyLayer compute the products in bfloat16 that its forward pass did, which has stored
    `enabled()` as `ctx.products`: a backward pass runs outside of the block."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Result:
        with products(ctx.products):
            return backward(ctx, *gradients)

    return run


@contextmanager
def weights_stay() -> Iterator[None]:
    """Round each parameter once inside, where none changes: in a step before its update, or in an evaluation.

    Whoever gives a parameter other values for a while calls `forget_rounded`. The rounded weights, half the memory of
    the weights, are freed at the end.
    """
    global _last_input
    token = None if _weights.get() is not None else _weights.set({})
    try:
        yield
    finally:
        if token is not None:
            _weights.reset(token)
            _last_input = None


def forget_rounded(weights: Iterable[Tensor]) -> None:
    """Round these parameters again at their next use: they have other values now."""
    kept = _weights.get() or {}
    for weight in weights:
        kept.pop(id(weight), None)


def linear(x: Tensor, weight: Tensor, transpose_weight: bool = False) -> Tensor:
    """Compute x W from operands in bfloat16; float32 [..., out].

    Args:
        x: float32 [..., in]; not written to before the next product that reads another tensor.
        weight: float32 W [in, out], or with `transpose_weight` W^T [out, in].
    """
    return _Linear.apply(x, weight, transpose_weight)


def head_matmul(a: Tensor, b: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Compute `paddle.matmul` for a tensor and a matrix of the head, in bfloat16 where its products are; then without a
    gradient."""
    return _matmul(HEAD, a, b, transpose_x, transpose_y)


def linear_matmul(a: Tensor, b: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Compute the same for a linear layer whose weight is no parameter."""
    return _matmul(LINEAR, a, b, transpose_x, transpose_y)


def _matmul(product: str, a: Tensor, b: Tensor, transpose_x: bool, transpose_y: bool) -> Tensor:
    if not computes(product, a, b):
        return paddle.matmul(a, b, transpose_x, transpose_y)
    out = _multiply(_rounded_input(a), _rounded_weight(b), transpose_a=transpose_x, transpose_b=transpose_y)
    return out if a.ndim == 2 else out.reshape([*a.shape[:-1], out.shape[-1]])


def head_add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a^T b in place for matrices of the head, without a gradient."""
    if computes(HEAD, total, a, b) and total.is_contiguous():
        _multiply(_rounded_input(a), _rounded(b), transpose_a=True, add_to=total)
    else:
        add_product(total, a, b)


class _Linear(PyLayer):
    """With y = x W and g the gradient of y: dx = g W^T, dW = x^T g, each from operands in bfloat16."""

    @staticmethod
    def forward(ctx, x, weight, transpose_weight):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad, ctx.shape = needs_grad(x, weight), x.shape
        ctx.weight, ctx.transposed = weight, transpose_weight  # the parameter itself, so that it is rounded once
        rows = _rounded_input(x)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None)
        out = _multiply(rows, _rounded_weight(weight), transpose_b=transpose_weight)
        return out.reshape([*x.shape[:-1], out.shape[-1]])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (rows,) = ctx.saved_tensor()
        for_x, for_weight = ctx.needs_input_grad
        grad = _rounded(grad)
        grad_x = grad_weight = None
        if for_x:
            grad_x = _multiply(grad, _rounded_weight(ctx.weight), transpose_b=not ctx.transposed).reshape(ctx.shape)
        if for_weight:
            left, right = (grad, rows) if ctx.transposed else (rows, grad)
            grad_weight = _multiply(left, right, transpose_a=True)
        return filter_gradients((grad_x, grad_weight), ctx.needs_input_grad)


def _multiply(
    a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False, add_to: Tensor | None = None
) -> Tensor:
    """Multiply bfloat16 matrices; float32, added to a matrix if there is one."""
    k, m = a.shape if transpose_a else reversed(a.shape)
    n = b.shape[0] if transpose_b else b.shape[1]
    if 0 in (m, n, k):
        return paddle.zeros([m, n]) if add_to is None else add_to
    if onednn.problem() is not None:  # `products` was asked for all the same
        product = paddle.matmul(a.astype("float32"), b.astype("float32"), transpose_a, transpose_b)
        return product if add_to is None else add_to.add_(product)
    out = paddle.empty([m, n]) if add_to is None else add_to
    onednn.multiply(
        m,
        n,
        k,
        a.data_ptr(),
        b.data_ptr(),
        out.data_ptr(),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        add=add_to is not None,
    )
    return out


def _rounded(x: Tensor) -> Tensor:
    """Round x [..., in] to a bfloat16 matrix [rows, in]."""
    x = x.contiguous()
    width = x.shape[-1]
    size = math.prod(x.shape)
    shape = [size // width if width else 0, width]
    if onednn.problem() is not None:
        return x.reshape(shape).astype("bfloat16")
    out = paddle.empty(shape, "bfloat16")
    onednn.round_to_bfloat16(size, x.data_ptr(), out.data_ptr())
    return out


class _Rounded(NamedTuple):
    """What a tensor was rounded to."""

    source: ref[Tensor]
    version: int
    rounded: Tensor


_last_input: _Rounded | None = None
_weights: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("rounded weights", default=None)


def _rounded_input(x: Tensor) -> Tensor:
    """Round x, or return what the call before has rounded it to: queries, keys and values come from one tensor, and
    so do gates and channels."""
    global _last_input
    last, version = _last_input, x.inplace_version
    if last is None or last.source() is not x or last.version != version:
        last = _last_input = _Rounded(ref(x), version, _rounded(x))
    return last.rounded


def _rounded_weight(weight: Tensor) -> Tensor:
    """Round a weight; inside of `weights_stay` a parameter only once."""
    kept = _weights.get()
    if kept is None or not isinstance(weight, EagerParamBase):
        return _rounded(weight)
    if id(weight) not in kept:
        kept[id(weight)] = weight, _rounded(weight)  # with the parameter, so that the id stays its own
    return kept[id(weight)][1]
