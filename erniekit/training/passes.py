"""What is computed of a batch, in two parts: the layers, and what follows them, which pipelines do on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.attention import AttentionPlan
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext

Result = TypeVar("Result")
Other = TypeVar("Other")


class MicroLoss(NamedTuple):
    """The result of one micro-batch. Sums, not means: only the loop knows what the whole step must be divided by."""

    loss_sum: Tensor  # 0-d fp32, differentiable
    sums: Mapping[str, Tensor]  # further figures, 0-d, summed over the same units; shown as sum / units


LossOfBatch = Callable[[Any, Any], MicroLoss]  # (model, batch)
# (decoder, hidden states [B, S, H] that have passed all layers and not the final norm, what the layers shared, batch,
# its constant)
Finish = Callable[[Decoder, Tensor, BatchContext, Any, Any], Result]


def no_constants(batches: Sequence[Any]) -> Sequence[Any]:
    """Nothing for each batch."""
    return [None] * len(batches)


@dataclass(frozen=True)
class DecoderPass(Generic[Result]):
    """A forward pass of a decoder over a batch.

    Attributes:
        finish: what is made of the hidden states.
        dense_mask: attention with a dense mask made from the FlashMask indices.
        constants: what `finish` needs that another model, or this one in another state, says of each of some batches.
    """

    finish: Finish[Result]
    dense_mask: bool = False
    constants: Callable[[Sequence[Any]], Sequence[Any]] = no_constants

    def __call__(self, decoder: Decoder, batch: Any) -> Result:
        """All of it, on a decoder that is whole."""
        (constant,) = self.constants([batch])  # first: it may borrow the decoder
        context = self.context(decoder, paddle.to_tensor(batch.position_ids), batch.startend_row_indices)
        hidden_BSH = decoder.through_layers(decoder.embedding(paddle.to_tensor(batch.input_ids)), context)
        return self.finish(decoder, hidden_BSH, context, batch, constant)

    def context(self, decoder: Decoder, position_ids_BS: Tensor, startend_row_indices: np.ndarray) -> BatchContext:
        """What the layers share, from FlashMask's causal indices int32[B, 1, S, 1] of a batch."""
        plan = AttentionPlan.build(startend_row_indices, causal=True, dense=self.dense_mask)
        length = startend_row_indices.shape[2]
        is_token = startend_row_indices[:, 0, :, 0] > np.arange(length)  # padding holds its own start
        is_token_BS = None if is_token.all() else paddle.to_tensor(is_token.astype(np.float32))
        return decoder.context(position_ids_BS, plan, is_token_BS)

    def then(self, function: Callable[[Result], Other]) -> DecoderPass[Other]:
        """The same with `function` of the result."""
        return replace(self, finish=lambda *given: function(self.finish(*given)))  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class DecoderLoss:
    """A loss of a batch. In training its figures include those of routers, which are in all layers.

    Attributes:
        units: how many units a batch holds.
    """

    own: DecoderPass[MicroLoss]
    units: Callable[[Any], int]

    def __call__(self, decoder: Decoder, batch: Any) -> MicroLoss:
        result = self.own(decoder, batch)
        return self.with_routers(result, decoder.balance.reported(), batch) if decoder.training else result

    def with_routers(self, result: MicroLoss, reported: Mapping[str, tuple[Tensor, int]], batch: Any) -> MicroLoss:
        """`result` with the mean of what routers have reported, by name the sum and the number of them."""
        units = self.units(batch)
        routers = {name: total * (units / count) for name, (total, count) in reported.items()}
        return MicroLoss(result.loss_sum, {**result.sums, **routers})  # shown per unit


def figures_of(loss: LossOfBatch) -> Callable[[Any, Any], Mapping[str, Tensor]]:
    """What `Ranks.measure` measures of a loss: `loss_sum` and the further sums."""

    def figures(result: MicroLoss) -> Mapping[str, Tensor]:
        return {"loss_sum": result.loss_sum, **result.sums}

    if isinstance(loss, DecoderLoss):
        return loss.own.then(figures)
    return lambda model, batch: figures(loss(model, batch))
