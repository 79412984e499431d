"""Recomputation: a layer keeps its input and computes the rest again in backward (Chen et al., 2016, 1604.06174).

Losses and gradients are the same to the bit: the same operations run on the same values, and every dropout mask is
drawn from its place in the run (`randomness.py`), so that the second pass draws what the first one drew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import paddle
from paddle.distributed.fleet.utils import recompute

if TYPE_CHECKING:
    from erniekit.model.decoder_layer import BatchContext, DecoderLayer


@dataclass(frozen=True)
class Recompute:
    """Which layers are computed again, and by which of Paddle's two mechanisms.

    `use_reentrant` runs the layer inside a PyLayer and calls autograd again from its backward; otherwise hooks on saved
    tensors bring the values back.
    """

    use_reentrant: bool = False
    first_layer: int = 0  # layers before this one keep their activations (`no_recompute_layers`)

    def __call__(self, layer: DecoderLayer, x_BSH: paddle.Tensor, context: BatchContext) -> paddle.Tensor:
        """`layer(x_BSH, context)`; in training, for layers from `first_layer` on, without keeping what is inside."""
        if not layer.training or not paddle.is_grad_enabled() or layer.layer < self.first_layer:
            return layer(x_BSH, context)
        if x_BSH.stop_gradient:
            # The PyLayer gives no gradient to the parameters inside (adapters) unless its input asks for one; the hooks
            # do, and yet warn that there was nothing to compute again.
            x_BSH = x_BSH.detach()
            x_BSH.stop_gradient = False
        # Paddle's own random state needs no care: nothing here draws from it without seeding it first.
        return recompute(layer, x_BSH, context, use_reentrant=self.use_reentrant, preserve_rng_state=False)
