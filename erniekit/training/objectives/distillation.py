"""The objective of distillation: the divergence of the student from a teacher at every target token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import paddle
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.distillation_head import TeacherOfRows, distillation_loss, target_states, teacher_of_states
from erniekit.model.divergence import Divergence
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss, run_forward
from erniekit.training.objectives.objective import Objective


class Teacher(Protocol):
    """What a teacher says of batches."""

    def __call__(self, batches: Sequence[Batch], /) -> Sequence[TeacherOfRows]:
        """Return for each batch what the teacher says of the positions that have a label."""
        ...


class _States(NamedTuple):
    """The last hidden states of a teacher at the positions that have a label, [T, H]."""

    states: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


def model_teacher(teacher: Decoder, *, dense_mask: bool = False) -> Teacher:
    """Return the teacher that is a model in memory, of which nothing gets a gradient.

    It computes its layers when a batch comes, and its logits chunk by chunk when the loss asks for them.

    Args:
        dense_mask: compute attention with a dense mask made from the FlashMask indices.
    """
    teacher.eval()
    for parameter in teacher.parameters():
        parameter.stop_gradient = True

    def head(decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: None) -> _States:
        return _States(target_states(decoder, hidden_BSH, paddle.to_tensor(batch.labels)))

    forward = DecoderForward(head, dense_mask)

    def of_batches(batches: Sequence[Batch]) -> Sequence[TeacherOfRows]:
        with paddle.no_grad():
            return [teacher_of_states(teacher, run_forward(forward, teacher, batch).states) for batch in batches]

    return of_batches


def distillation(
    teacher: Callable[[Sequence[Batch]], Sequence[TeacherOfRows]],
    divergence: Divergence,
    sft_share: float = 0.0,
    *,
    dense_mask: bool = False,
) -> Objective:
    """Build the loss (1 - share) D + share (-log p[label]), averaged over the target tokens of the step.

    Its metrics, per target token: `divergence` (D, times the temperature squared), `sft_loss` (-log p[label] at the
    temperature 1, whatever its share), `teacher_agreement` (the first choices of student and teacher are the same) and
    `token_accuracy` (the student's first choice is the label).

    Args:
        sft_share: the share of the negative log-likelihood of the labels, between 0 and 1.
        dense_mask: compute attention with a dense mask made from the FlashMask indices.
    """

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, said: TeacherOfRows
    ) -> MicroBatchLoss:
        found = distillation_loss(decoder, hidden_BSH, paddle.to_tensor(batch.labels), said, divergence, sft_share)
        metric_sums = {
            "divergence": found.divergence_sum,
            "sft_loss": found.nll_sum,
            "teacher_agreement": found.agreement_count,
            "token_accuracy": found.correct_count,
        }
        return MicroBatchLoss(found.loss_sum, metric_sums)

    loss = DecoderLoss(loss_head, lambda batch: batch.target_count, dense_mask, teacher)
    return Objective(loss, unit="target tokens")
