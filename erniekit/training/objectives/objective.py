"""What a run minimises. The loop knows losses only in this form, so that one loop serves SFT, pre-training and DPO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import IGNORE_INDEX, TokenLoss, token_loss
from erniekit.model.mtp import shift_within_documents
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, LossFunction, MicroBatchLoss

__all__ = ["LossFunction", "MicroBatchLoss", "Objective", "supervised"]


@dataclass(frozen=True)
class Objective:
    """A loss and the unit it is averaged over.

    Attributes:
        loss: of one micro-batch.
        units: how many units a batch holds, known without running the model.
        unit: "target tokens", "pairs": for messages.
        perplexity: whether exp(loss) means something.
        loss_of_step: for a loss that depends on more than its micro-batch: gives the loss to use with all the batches
            of a step, or of an evaluation (which are read one at a time), from this rank's batches and the ranks.
            Called without gradients.
        after_update: called with the number of finished steps, before anything is saved.
        extra_state: what a checkpoint must hold for the loss of a resumed run to be the same.
    """

    loss: LossFunction
    units: Callable[[Any], int]
    unit: str
    perplexity: bool = False
    loss_of_step: Callable[[Any, Iterable[Any], Ranks], LossFunction] | None = None
    after_update: Callable[[int], None] = lambda step: None
    extra_state: Callable[[], Mapping[str, Tensor]] = dict

    def loss_for(self, model: Any, batches: Iterable[Any], ranks: Ranks = SINGLE_PROCESS) -> LossFunction:
        """The loss to use with each of `batches`, this rank's part of one step or one evaluation."""
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
    """Negative log-likelihood of the target tokens, for SFT and pre-training.

    Multi-token prediction layers, where the model has them, learn beside it; `loss_sum` has their gradient and not
    their value, so that losses of different models compare.

    Args:
        fused_head: head and loss in chunks, so that the logits of a long pack never exist whole.
        sparse_head: the head is computed only where there is a label.
        dense_mask: attention with a dense mask made from the FlashMask indices.
        multi_token_pred_lambda: the weight of the mean over the depths of their summed losses.
    """

    def loss_head(decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Any, _: None) -> MicroBatchLoss:
        def head_loss(states_BSH: Tensor, labels_BS: np.ndarray) -> TokenLoss:
            labels = paddle.to_tensor(labels_BS)
            return token_loss(decoder, decoder.norm(states_BSH), labels, fused=fused_head, sparse=sparse_head)

        result = head_loss(hidden_BSH, batch.labels)
        metric_sums = {"token_accuracy": result.correct_count}
        if not (decoder.training and decoder.mtp):
            return MicroBatchLoss(result.loss_sum, metric_sums)
        depths = range(1, len(decoder.mtp) + 1)
        ids = [
            paddle.to_tensor(shift_within_documents(batch.input_ids, batch.document_ends, depth, fill=0))
            for depth in depths
        ]
        predicted = [
            head_loss(
                states, shift_within_documents(batch.labels, batch.document_ends, depth, fill=IGNORE_INDEX)
            ).loss_sum
            for depth, states in zip(depths, decoder.forward_mtp(hidden_BSH, context, ids), strict=True)
        ]
        mtp_sum = paddle.add_n(predicted) / len(predicted)
        metric_sums["mtp_loss"] = mtp_sum.detach()
        return MicroBatchLoss(result.loss_sum + multi_token_pred_lambda * (mtp_sum - mtp_sum.detach()), metric_sums)

    def units(batch: Any) -> int:
        return batch.target_count

    loss = DecoderLoss(DecoderForward(loss_head, dense_mask), units)
    return Objective(loss, units, unit="target tokens", perplexity=True)
