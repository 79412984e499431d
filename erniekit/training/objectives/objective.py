"""Objectives: what a run minimises. One training loop serves SFT, pre-training and DPO, because it knows only these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import IGNORE_INDEX, TokenLoss, token_loss
from erniekit.model.mtp import shift_within_documents
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import DecoderLoss, Loss, MicroBatchLoss

__all__ = ["MicroBatchLoss", "Objective", "supervised"]


@dataclass(frozen=True)
class Objective:
    """A loss, and what the loop needs to know of it.

    Attributes:
        loss: the loss of one micro-batch.
        unit: what the loss is averaged over, for messages: "target tokens", "pairs".
        perplexity: whether exp(loss) means something.
        loss_of_step: for a loss that depends on more than its micro-batch; returns the loss to use with all batches of
            a step, or of an evaluation (which are read one at a time). Called without gradients, with the model, this
            rank's batches and the ranks.
        part_for_loss: returns the part of a batch that the loss reads, where `loss_of_step` reads more than it.
        after_update: called with the number of finished steps, before anything is saved.
        extra_state: returns what a checkpoint must hold so that the loss of a resumed run is the same.
    """

    loss: Loss
    unit: str
    perplexity: bool = False
    loss_of_step: Callable[[Any, Iterable[Any], Ranks], Loss] | None = None
    part_for_loss: Callable[[Any], Any] = lambda batch: batch
    after_update: Callable[[int], None] = lambda step: None
    extra_state: Callable[[], Mapping[str, Tensor]] = dict

    def units(self, batch: Any) -> int:
        """Return how many units a batch holds, without running the model."""
        return self.loss.units(batch)

    def loss_for(self, model: Any, batches: Iterable[Any], ranks: Ranks = SINGLE_PROCESS) -> Loss:
        """Return the loss to use with each of `batches`, this rank's part of one step or one evaluation."""
        if self.loss_of_step is None:
            return self.loss
        with paddle.no_grad():
            return self.loss_of_step(model, batches, ranks)


def supervised(
    *,
    fused_head: bool = False,
    sparse_head: bool = False,
    dense_mask: bool = False,
    multi_token_pred_lambda: float = 0.0,
) -> Objective:
    """Build the negative log-likelihood of the target tokens, the objective of SFT and pre-training.

    Multi-token prediction layers are trained too, where the model has them. `loss_sum` includes the gradient of their
    loss and not its value, so that the losses of different models can be compared.

    Args:
        fused_head: compute head and loss in chunks, so that the logits of a long pack never exist as a whole.
        sparse_head: compute the head only where there is a label.
        dense_mask: compute attention with a dense mask made from the FlashMask indices.
        multi_token_pred_lambda: the weight of the multi-token prediction loss, the mean over the depths.
    """

    def loss_head(decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: None) -> MicroBatchLoss:
        def head_loss(states_BSH: Tensor, labels_BS: np.ndarray) -> TokenLoss:
            labels = paddle.to_tensor(labels_BS)
            return token_loss(decoder, decoder.norm(states_BSH), labels, fused=fused_head, sparse=sparse_head)

        result = head_loss(hidden_BSH, batch.labels)
        metric_sums = {"token_accuracy": result.correct_count}
        if not (decoder.training and decoder.mtp):
            return MicroBatchLoss(result.loss_sum, metric_sums)
        depths = range(1, len(decoder.mtp) + 1)
        inputs = [
            {"input_ids": paddle.to_tensor(shift_within_documents(batch.input_ids, batch.document_ends, depth, fill=0))}
            for depth in depths
        ]
        predicted = [
            head_loss(
                states, shift_within_documents(batch.labels, batch.document_ends, depth, fill=IGNORE_INDEX)
            ).loss_sum
            for depth, states in zip(depths, decoder.forward_mtp(hidden_BSH, context, inputs), strict=True)
        ]
        mtp_sum = paddle.add_n(predicted) / len(predicted)
        metric_sums["mtp_loss"] = mtp_sum.detach()
        return MicroBatchLoss(result.loss_sum + multi_token_pred_lambda * (mtp_sum - mtp_sum.detach()), metric_sums)

    loss = DecoderLoss(loss_head, lambda batch: batch.target_count, dense_mask)
    return Objective(loss, unit="target tokens", perplexity=True)
