"""Train in bfloat16 on a CPU: which products of a decoder round their factors, and what Paddle's words for mixed
precision mean there.

Weights, activations between products, norms, softmax, loss and the optimizer are float32 at both levels, as are the
results of the products (`bf16.py`). A GPU's products have 16-bit results, which is why its head is float32
(`mixed_precision.py`); here logits are float32 in any case, so the head takes part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from erniekit.model import bf16
from erniekit.model.bf16 import HEAD, LINEAR, PRODUCTS
from erniekit.model.decoder import Decoder
from erniekit.model.mixed_precision import float32_layers

# Paddle's names of the operators that these products stand for.
OPERATORS = {
    LINEAR: ("matmul", "matmul_v2", "mul", "linear_v2"),
    HEAD: ("softmax_with_cross_entropy", "c_softmax_with_cross_entropy", "cross_entropy_with_softmax"),
}


@dataclass(frozen=True)
class CpuBFloat16:
    """Mixed precision on a CPU; see `docs/parameters/precision.md`.

    Attributes:
        products: those that compute in bfloat16, of `bf16.PRODUCTS`.
        rounded_gradients: round the gradients of weights that a GPU stores in 16 bits, as level O2 does without float32
            gradients.
    """

    products: frozenset[str] = PRODUCTS
    rounded_gradients: bool = False
    dtype: Literal["bfloat16"] = "bfloat16"

    def __str__(self) -> str:
        names = [name for product, name in ((LINEAR, "linear layers"), (HEAD, "head")) if product in self.products]
        gradients = "gradients rounded to bfloat16" if self.rounded_gradients else "float32 gradients"
        return f"bfloat16 products of {' and '.join(names)}; float32 weights, {gradients}"

    def apply_to(self, decoder: Decoder) -> None:
        """Make the decoder use this precision in training and evaluation."""
        for _, block in decoder.named_blocks():
            product = HEAD if isinstance(block, decoder.config.architecture.modules().head) else LINEAR
            block.forward = _computing(block.forward, self.products & {product})
        if self.rounded_gradients:
            _round_gradients(decoder)


def chosen_products(white_list: Collection[str], black_list: Collection[str], *, head: bool) -> frozenset[str]:
    """Return the products that compute in bfloat16. `matmul` in the black list stands for all of them.

    Args:
        white_list, black_list: of Paddle's names (`OPERATORS`).
        head: whether that of the head does if neither list names it.
    """
    chosen = {LINEAR, HEAD} if head or _names(HEAD, white_list) else {LINEAR}
    if _names(LINEAR, black_list):
        return frozenset()
    return frozenset(chosen - {HEAD} if _names(HEAD, black_list) else chosen)


def without_effect(names: Collection[str]) -> list[str]:
    """Return the names of a list that change nothing on a CPU."""
    return [name for name in names if not any(name in operators for operators in OPERATORS.values())]


def _names(product: str, operators: Collection[str]) -> bool:
    return not set(OPERATORS[product]).isdisjoint(operators)


def _computing(function: Callable[..., Any], products: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with bf16.products(products):
            return function(*arguments, **named)

    return wrapped


def _round_gradients(decoder: Decoder) -> None:
    """Round each gradient to bfloat16 before it is added to those of earlier micro-batches."""
    for layer in decoder.sublayers():
        if not isinstance(layer, float32_layers(decoder)):
            for parameter in layer.parameters(include_sublayers=False):
                if not parameter.stop_gradient:
                    parameter.register_hook(lambda gradient: gradient.astype("bfloat16").astype("float32"))
