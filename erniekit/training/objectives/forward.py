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


class MicroBatchLoss(NamedTuple):
    """The result of one micro-batch. Sums, not means: only the loop knows what the whole step must be divided by."""

    loss_sum: Tensor  # 0-d fp32, differentiable
    metric_sums: Mapping[str, Tensor]  # further figures, 0-d, summed over the same units; shown as sum / units


LossFunction = Callable[[Any, Any], MicroBatchLoss]  # (model, batch)
# (decoder, hidden states [B, S, H] that have passed all layers and not the final norm, what the layers shared, batch,
# its constant)
LossHead = Callable[[Decoder, Tensor, BatchContext, Any, Any], Result]


def no_reference_inputs(batches: Sequence[Any]) -> Sequence[Any]:
    """Nothing for each batch."""
    return [None] * len(batches)


@dataclass(frozen=True)
class DecoderForward(Generic[Result]):
    """A forward pass of a decoder over a batch.

    Attributes:
        loss_head: what is made of the hidden states.
        dense_mask: attention with a dense mask made from the FlashMask indices.
        reference_inputs: what `finish` needs that another model, or this one in another state, says of each of some
        batches.
    """

    loss_head: LossHead[Result]
    dense_mask: bool = False
    reference_inputs: Callable[[Sequence[Any]], Sequence[Any]] = no_reference_inputs

    def __call__(self, decoder: Decoder, batch: Any) -> Result:
        """All of it, on a decoder that is whole."""
        (reference_input,) = self.reference_inputs([batch])  # first: it may borrow the decoder
        context = self.context(decoder, paddle.to_tensor(batch.position_ids), batch.startend_row_indices)
        hidden_BSH = decoder.forward_layers(decoder.embedding(paddle.to_tensor(batch.input_ids)), context)
        return self.loss_head(decoder, hidden_BSH, context, batch, reference_input)

    def context(self, decoder: Decoder, position_ids_BS: Tensor, startend_row_indices: np.ndarray) -> BatchContext:
        """What the layers share, from FlashMask's causal indices int32[B, 1, S, 1] of a batch."""
        plan = AttentionPlan.build(startend_row_indices, causal=True, dense=self.dense_mask)
        length = startend_row_indices.shape[2]
        is_token = startend_row_indices[:, 0, :, 0] > np.arange(length)  # padding holds its own start
        is_token_BS = None if is_token.all() else paddle.to_tensor(is_token.astype(np.float32))
        return decoder.context(position_ids_BS, plan, is_token_BS)

    def map(self, function: Callable[[Result], Other]) -> DecoderForward[Other]:
        """The same with `function` of the result."""
        return replace(self, loss_head=lambda *given: function(self.loss_head(*given)))  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class DecoderLoss:
    """A loss of a batch. In training its figures include those of routers, which are in all layers.

    Attributes:
        units: how many units a batch holds.
    """

    forward: DecoderForward[MicroBatchLoss]
    units: Callable[[Any], int]

    def __call__(self, decoder: Decoder, batch: Any) -> MicroBatchLoss:
        result = self.forward(decoder, batch)
        return self.with_router_metrics(result, decoder.balance.reported(), batch) if decoder.training else result

    def with_router_metrics(
        self, result: MicroBatchLoss, reported: Mapping[str, tuple[Tensor, int]], batch: Any
    ) -> MicroBatchLoss:
        """`result` with the mean of what routers have reported, by name the sum and the number of them."""
        units = self.units(batch)
        routers = {name: total * (units / count) for name, (total, count) in reported.items()}
        return MicroBatchLoss(result.loss_sum, {**result.metric_sums, **routers})  # shown per unit


def metrics_of(loss: LossFunction) -> Callable[[Any, Any], Mapping[str, Tensor]]:
    """What `Ranks.measure` measures of a loss: `loss_sum` and the further sums."""

    def metrics(result: MicroBatchLoss) -> Mapping[str, Tensor]:
        return {"loss_sum": result.loss_sum, **result.metric_sums}

    if isinstance(loss, DecoderLoss):
        return loss.forward.map(metrics)
    return lambda model, batch: metrics(loss(model, batch))
