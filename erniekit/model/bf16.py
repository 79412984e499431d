"""Products in bfloat16 on a CPU: bfloat16 operands, float32 sums and outputs, through oneDNN (`native/onednn.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import paddle
import paddle.nn.functional as F

# The products there are: of linear layers, experts and adapters, and of the head.
LINEAR, HEAD = "linear", "head"
PRODUCTS = frozenset({LINEAR, HEAD})
_enabled: ContextVar[frozenset[str]] = ContextVar("bfloat16 products", default=frozenset())


def is_available() -> tuple[bool, str]:
    """Return whether this processor multiplies bfloat16, and a sentence about it for the user."""
    return False, "products in bfloat16 are not implemented yet"


def is_faster() -> tuple[bool, str]:
    """Return whether bfloat16 products are faster here than those in float32, and a sentence about it."""
    return is_available()


@contextmanager
def products(enabled: frozenset[str] = PRODUCTS) -> Iterator[None]:
    """Compute these products in bfloat16 inside, and the others in float32, with the gradients of each."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def computes(product: str) -> bool:
    """Return whether this product is computed in bfloat16 here."""
    return product in _enabled.get()


def linear(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    """Compute x W for float32 x [..., in] and W [in, out] with bfloat16 operands; float32 [..., out]."""
    return F.linear(x, weight)


@contextmanager
def weights_stay() -> Iterator[None]:
    """Inside no weight changes (a step before its update, an evaluation), so each is rounded to bfloat16 only once."""
    yield
