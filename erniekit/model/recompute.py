"""Recomputation: a layer, or a part of it, keeps only its input and computes the rest again in backward.

Chen et al., 2016, arXiv:1604.06174. Losses and gradients are the same to the bit: the same operations run on the same
values, and every dropout mask is seeded by its position in the run (`randomness.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from erniekit.model import bf16

if TYPE_CHECKING:
    from erniekit.model.decoder_layer import BatchContext, DecoderLayer


@dataclass(frozen=True)
class Recompute:
    """Which layers, or which parts of them, are recomputed, and by which of Paddle's two mechanisms.

    `use_reentrant` runs the part inside a PyLayer and calls autograd again from its backward; otherwise hooks on saved
    tensors restore the values.

    Attributes:
        first_layer: layers before this one keep their activations (`no_recompute_layers`).
        granularity: "full": the layer; "full_attn": its attention block with the norm before it; "core_attn": only
            the attention product, so that queries, keys and values are kept.
    """

    use_reentrant: bool = False
    first_layer: int = 0
    granularity: str = "full"

    def __str__(self) -> str:
        part = {"full": "all", "full_attn": "the attention block", "core_attn": "the attention product"}
        return f"{part[self.granularity]} of each, by {'PyLayer' if self.use_reentrant else 'hooks'}"

    def __call__(self, layer: DecoderLayer, x_BSH: paddle.Tensor, context: BatchContext) -> paddle.Tensor:
        """Run `layer(x_BSH, context)`; in training, from `first_layer` on, without keeping activations."""
        if not layer.training or not paddle.is_grad_enabled() or layer.layer < self.first_layer:
            return layer(x_BSH, context)
        if self.granularity == "full_attn":
            return layer(x_BSH, replace(context, run_attention=self._recompute))
        if self.granularity == "core_attn":
            return layer(x_BSH, replace(context, run_core_attention=self._recompute_core_attention))
        return self._recompute(layer, x_BSH, context)

    def whole_layer(self, layer: nn.Layer, x: paddle.Tensor, *others: Any) -> paddle.Tensor:
        """Run `layer(x, *others)`, a layer of an encoder; in training without keeping activations.

        A frozen layer on a frozen input has none to keep. That is so on all ranks or on none, which cannot be said of
        a layer of experts: of ranks that divide them, one may hold none that is trained, and the collectives that
        recomputation repeats have to be repeated by all.
        """
        return layer(x, *others) if _has_no_graph(layer, x) else self._recompute(layer, x, *others)

    def _recompute(self, function: Callable[..., paddle.Tensor], x: paddle.Tensor, *others: Any) -> paddle.Tensor:
        if x.stop_gradient:
            # The PyLayer gives no gradient to the parameters inside (adapters) unless its input requires one; the hooks
            # do, but warn that there was nothing to recompute.
            x = x.detach()
            x.stop_gradient = False
        # Paddle's own random state needs no care: nothing here draws from it without seeding it first.
        return recompute(
            bf16.with_products_of_now(function), x, *others, use_reentrant=self.use_reentrant, preserve_rng_state=False
        )

    def _recompute_core_attention(
        self, function: Callable[..., paddle.Tensor], *inputs: paddle.Tensor
    ) -> paddle.Tensor:
        if all(x.stop_gradient for x in inputs):
            return function(*inputs)  # everything before is frozen, and there are no parameters inside
        return recompute(
            bf16.with_products_of_now(function), *inputs, use_reentrant=self.use_reentrant, preserve_rng_state=False
        )


def _has_no_graph(layer: nn.Layer, x: paddle.Tensor) -> bool:
    """Return whether a layer keeps nothing for backward anyway: outside of training, or frozen on a frozen input."""
    if not layer.training or not paddle.is_grad_enabled():
        return True
    return x.stop_gradient and all(parameter.stop_gradient for parameter in layer.parameters())
