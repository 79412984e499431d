"""What a run minimises. The loop knows losses only in this form, so that one loop serves SFT, pre-training and DPO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.attention import AttentionPlan
from erniekit.model.decoder import Decoder
from erniekit.model.head import NO_TARGET, TokenLoss, token_loss
from erniekit.model.mtp import ahead


class MicroLoss(NamedTuple):
    """The result of one micro-batch. Sums, not means: only the loop knows what the whole step must be divided by."""

    loss_sum: Tensor  # 0-d fp32, differentiable
    sums: Mapping[str, Tensor]  # further figures, 0-d, summed over the same units; shown as sum / units


LossOfBatch = Callable[[Any, Any], MicroLoss]  # (model, batch)
Sum = Callable[[np.ndarray], np.ndarray]  # of figures, over the ranks that work on different data


def own_figures(values: np.ndarray) -> np.ndarray:
    """The sum over the ranks of a run with one."""
    return values


@dataclass(frozen=True)
class Objective:
    """A loss and the unit it is averaged over.

    Attributes:
        loss: of one micro-batch.
        units: how many units a batch holds, known without running the model.
        unit: "target tokens", "pairs": for messages.
        perplexity: whether exp(loss) means something.
        loss_of_step: for a loss that depends on more than its micro-batch: gives the loss to use with all the batches
            of a step, or of an evaluation (which are read one at a time), from this rank's batches and a way to sum
            over ranks. Called without gradients.
        after_update: called with the number of finished steps, before anything is saved.
        beside_model: what a checkpoint must hold for the loss of a resumed run to be the same.
    """

    loss: LossOfBatch
    units: Callable[[Any], int]
    unit: str
    perplexity: bool = False
    loss_of_step: Callable[[Any, Iterable[Any], Sum], LossOfBatch] | None = None
    after_update: Callable[[int], None] = lambda step: None
    beside_model: Callable[[], Mapping[str, Tensor]] = dict

    def loss_for(self, model: Any, batches: Iterable[Any], sum_over_ranks: Sum = own_figures) -> LossOfBatch:
        """The loss to use with each of `batches`, this rank's part of one step or one evaluation."""
        if self.loss_of_step is None:
            return self.loss
        with paddle.no_grad():
            return self.loss_of_step(model, batches, sum_over_ranks)


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

    def loss(decoder: Decoder, batch: Any) -> MicroLoss:
        plan = AttentionPlan.build(batch.startend_row_indices, causal=True, dense=dense_mask)
        inputs = paddle.to_tensor(batch.input_ids), paddle.to_tensor(batch.position_ids), plan
        is_token_BS = None if batch.is_token.all() else paddle.to_tensor(batch.is_token.astype(np.float32))

        def head_loss(hidden_BSH: Tensor, labels_BS: np.ndarray) -> TokenLoss:
            labels = paddle.to_tensor(labels_BS)
            return token_loss(decoder, hidden_BSH, labels, fused=fused_head, sparse=sparse_head)

        if not (decoder.training and decoder.mtp):
            result = head_loss(decoder(*inputs, is_token_BS), batch.labels)
            sums = {"token_accuracy": result.correct_count}
            loss_sum = result.loss_sum
        else:
            depths = range(1, len(decoder.mtp) + 1)
            ids = [paddle.to_tensor(ahead(batch.input_ids, batch.document_ends, depth, fill=0)) for depth in depths]
            hidden, *further = decoder.predict_ahead(*inputs, ids, is_token_BS)
            result = head_loss(hidden, batch.labels)
            predicted = [
                head_loss(states, ahead(batch.labels, batch.document_ends, depth, fill=NO_TARGET)).loss_sum
                for depth, states in zip(depths, further, strict=True)
            ]
            mtp_sum = paddle.add_n(predicted) / len(predicted)
            sums = {"token_accuracy": result.correct_count, "mtp_loss": mtp_sum.detach()}
            loss_sum = result.loss_sum + multi_token_pred_lambda * (mtp_sum - mtp_sum.detach())
        if decoder.training:
            figures = decoder.balance.figures()
            sums |= {name: figure * batch.target_count for name, figure in figures.items()}  # shown per target token
        return MicroLoss(loss_sum, sums)

    return Objective(loss, units=lambda batch: batch.target_count, unit="target tokens", perplexity=True)
