"""The forward pass of a micro-batch in two parts, so that the ranks of a pipeline can share it.

Embedding and decoder layers come first; then a head turns hidden states into a loss, or into other tensors. To add a
loss, write its `loss_head` and make a `DecoderLoss` of it. One process calls the loss with its decoder; a pipeline runs
the layers on all stages and calls `loss_head` on the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import paddle
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.model.attention import AttentionPlan
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext


class HeadResult(Protocol):
    """What a head returns: tensors with names, which ranks can exchange."""

    def named_tensors(self) -> Mapping[str, Tensor]: ...


class MicroBatchLoss(NamedTuple):
    """The loss of one micro-batch: sums, because only the training step knows the units of all its micro-batches.

    Attributes:
        loss_sum: fp32, 0-d; carries the gradient.
        metric_sums: further metrics by name, 0-d, summed over the same units; logs show sum / units.
    """

    loss_sum: Tensor
    metric_sums: Mapping[str, Tensor]

    def named_tensors(self) -> Mapping[str, Tensor]:
        return {"loss_sum": self.loss_sum, **self.metric_sums}


Result = TypeVar("Result", bound=HeadResult, covariant=True)
LossFunction = Callable[[Any, Any], MicroBatchLoss]  # (model, batch)
# (decoder, hidden states [B, S, H] after all layers and before the final norm, context of the layers, batch, its
# reference input)
LossHead = Callable[[Decoder, Tensor, BatchContext, Batch, Any], Result]
ReferenceInputs = Callable[[Sequence[Batch]], Sequence[Any]]


class Forward(Protocol[Result]):
    """A forward pass of one micro-batch.

    Attributes:
        loss_head: computes the result from the hidden states.
        dense_mask: whether attention uses a dense mask made from the FlashMask indices.
        reference_inputs: computes, for some batches, the input of `loss_head` that comes from another model, or from
            this one in another state; one for each batch.
    """

    @property
    def loss_head(self) -> LossHead[Result]: ...
    @property
    def dense_mask(self) -> bool: ...
    @property
    def reference_inputs(self) -> ReferenceInputs: ...

    def __call__(self, model: Any, batch: Any, /) -> Result:
        """Compute all of it; the whole model is in this process."""
        ...


class Loss(Forward[MicroBatchLoss], Protocol):
    """A loss of one micro-batch.

    Attributes:
        units: counts what the loss is averaged over in a batch (target tokens, pairs), without running the model.
    """

    @property
    def units(self) -> Callable[[Any], int]: ...


def no_reference_inputs(batches: Sequence[Batch]) -> Sequence[None]:
    """Return None for each batch."""
    return [None] * len(batches)


@dataclass(frozen=True)
class DecoderForward(Generic[Result]):
    """A `Forward` that is no loss."""

    loss_head: LossHead[Result]
    dense_mask: bool = False
    reference_inputs: ReferenceInputs = no_reference_inputs

    def __call__(self, decoder: Decoder, batch: Batch) -> Result:
        return run_forward(self, decoder, batch)


@dataclass(frozen=True)
class DecoderLoss:
    """A `Loss`. In training its metrics include those of the routers, which are in all layers."""

    loss_head: LossHead[MicroBatchLoss]
    units: Callable[[Batch], int]
    dense_mask: bool = False
    reference_inputs: ReferenceInputs = no_reference_inputs

    def __call__(self, decoder: Decoder, batch: Batch) -> MicroBatchLoss:
        result = run_forward(self, decoder, batch)
        if not decoder.training:
            return result
        return add_router_metrics(result, decoder.balance.reported(), self.units(batch))


def run_forward(forward: Forward[Result], decoder: Decoder, batch: Batch) -> Result:
    """Run embedding, layers and head of a decoder that is whole in this process."""
    (reference_input,) = forward.reference_inputs([batch])  # first, because it may borrow the decoder
    context = batch_context(decoder, batch, dense_mask=forward.dense_mask)
    hidden_BSH = decoder.forward_layers(decoder.embed(embedding_inputs(decoder, batch)), context)
    return forward.loss_head(decoder, hidden_BSH, context, batch, reference_input)


def embedding_inputs(decoder: Decoder, batch: Batch) -> dict[str, Tensor]:
    """Return the arrays of a batch that `decoder.embed` reads, as tensors by name."""
    return {name: paddle.to_tensor(batch.arrays[name]) for name in decoder.input_names if name in batch.arrays}


def batch_context(decoder: Decoder, batch: Batch, *, dense_mask: bool = False) -> BatchContext:
    """Return what the layers share while they compute a batch: positions, attention plan and padding."""
    indices = batch.startend_row_indices
    plan = AttentionPlan.build(indices, causal=indices.shape[-1] == 1, dense=dense_mask)
    is_token = batch.is_token
    is_token_BS = None if is_token.all() else paddle.to_tensor(is_token.astype(np.float32))
    return decoder.context(paddle.to_tensor(batch.position_ids), plan, is_token_BS)


def add_router_metrics(
    result: MicroBatchLoss, reported: Mapping[str, tuple[Tensor, int]], units: int
) -> MicroBatchLoss:
    """Return `result` with the mean of what the routers have reported, times `units`, among its metrics.

    Args:
        reported: by name the sum over routers, 0-d, and the number of routers.
    """
    routers = {name: total * (units / count) for name, (total, count) in reported.items()}
    return MicroBatchLoss(result.loss_sum, {**result.metric_sums, **routers})
