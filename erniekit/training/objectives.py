"""What a run minimises. The loop knows losses only in this form, so that one loop serves SFT, pre-training and DPO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.nn import Layer

from erniekit.model.attention import AttentionPlan
from erniekit.model.head import token_loss


class MicroLoss(NamedTuple):
    """The result of one micro-batch. Sums, not means: only the loop knows what the whole step must be divided by."""

    loss_sum: Tensor  # 0-d fp32, differentiable
    sums: Mapping[str, Tensor]  # further figures, 0-d, summed over the same units; shown as sum / units


@dataclass(frozen=True)
class Objective:
    """A loss and the unit it is averaged over."""

    loss: Callable[[Layer, Any], MicroLoss]  # (model, batch)
    units: Callable[[Any], int]  # how many units a batch holds, known without running the model
    unit: str  # "target tokens", "pairs": for messages
    perplexity: bool = False  # whether exp(loss) means something


def supervised(*, fused_head: bool = False, sparse_head: bool = False, dense_mask: bool = False) -> Objective:
    """Negative log-likelihood of the target tokens, for SFT and pre-training.

    Args:
        fused_head: head and loss in chunks, so that the logits of a long pack never exist whole.
        sparse_head: the head is computed only where there is a label.
        dense_mask: attention with a dense mask made from the FlashMask indices.
    """

    def loss(decoder: Layer, batch: Any) -> MicroLoss:
        plan = AttentionPlan.build(batch.startend_row_indices, causal=True, dense=dense_mask)
        hidden_BSH = decoder(paddle.to_tensor(batch.input_ids), paddle.to_tensor(batch.position_ids), plan)
        labels_BS = paddle.to_tensor(batch.labels)
        result = token_loss(decoder, hidden_BSH, labels_BS, fused=fused_head, sparse=sparse_head)
        return MicroLoss(result.loss_sum, {"token_accuracy": result.correct_count})

    return Objective(loss, units=lambda batch: batch.target_count, unit="target tokens", perplexity=True)
