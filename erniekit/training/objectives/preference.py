"""The objective of preference training: the loss of each pair of answers, and its metrics, from packed pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.config.sections.dpo import DpoParameters
from erniekit.data.batch import Batch, PairSpans
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import token_log_probabilities
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.preference_losses import LOSSES, LossContext, needs_reference
from erniekit.training.objectives.reference import ComputeLogps, Reference, ReferenceLogps, eval_mode


class AnswerLogProbabilities(NamedTuple):
    """The summed log-probabilities of the answers of P pairs, and the answers' lengths in tokens; fp32[P] each."""

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        """Return the log-probabilities, which are what a reference needs."""
        return {"chosen": self.chosen, "rejected": self.rejected}


class LogRatioSums(NamedTuple):
    """The log-ratios of chosen and of rejected answers, each summed over the pairs of a batch; 0-d."""

    chosen: Tensor
    rejected: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


def answer_log_probabilities(
    *, fused_head: bool = False, sparse_head: bool = False, dense_mask: bool = False
) -> DecoderForward[AnswerLogProbabilities]:
    """Build the forward pass that sums the log-probabilities of each answer's labels; 0 of an answer without labels.

    Multi-token prediction layers play no part in it.
    """

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, reference_input: Any
    ) -> AnswerLogProbabilities:
        pairs = _pairs(batch)
        labels = paddle.to_tensor(batch.labels)
        states_BSH = decoder.norm(hidden_BSH)
        tokens = token_log_probabilities(decoder, states_BSH, labels, fused=fused_head, sparse=sparse_head)
        if not pairs.count:
            nothing = tokens.values  # [0], still a function of the weights
            return AnswerLogProbabilities(nothing, nothing, nothing.detach(), nothing.detach())
        answers = pairs.answers[pairs.answers >= 0]  # in the order of positions, as `tokens` are
        # float64: a sum over thousands of tokens in float32 loses the digits that the loss is made of
        sums = paddle.geometric.segment_sum(tokens.values.astype("float64"), paddle.to_tensor(answers))
        sums = sums.astype(tokens.values.dtype)
        if lacking := 2 * pairs.count - sums.shape[0]:
            sums = paddle.concat([sums, paddle.zeros([lacking], sums.dtype)])
        lengths = paddle.to_tensor(np.bincount(answers, minlength=2 * pairs.count)).astype(sums.dtype)
        return AnswerLogProbabilities(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2])

    return DecoderForward(loss_head, dense_mask)


def reference_logps_function(
    answers: DecoderForward[AnswerLogProbabilities], ranks: Ranks = SINGLE_PROCESS
) -> ComputeLogps:
    """Return the function that computes a reference's log-probabilities."""

    def measure(model: Decoder, batches: Sequence[Batch]) -> Sequence[ReferenceLogps]:
        found = ranks.forward_only(model, answers, batches)
        return [(paddle.to_tensor(of["chosen"]), paddle.to_tensor(of["rejected"])) for of in found]

    return measure


def preference(
    settings: DpoParameters,
    reference: Reference | None = None,
    *,
    fused_head: bool = False,
    sparse_head: bool = False,
    dense_mask: bool = False,
) -> Objective:
    """Build the objective of a preference loss (`preference_losses`), averaged over the pairs of the step.

    Its metrics: `preference_loss`, `sft_loss` where it has a weight, `reward_chosen`, `reward_rejected`,
    `reward_margin`, `reward_accuracy` (chosen above rejected), `logps_chosen`, `logps_rejected` (sums over an answer),
    and with a reference `kl_to_reference`: the mean log-ratio of both answers, which estimates the divergence from the
    reference as far as the answers are like the model's own.

    Args:
        reference: where it is None, its log-probabilities count as 0.
    """
    loss_kind = LOSSES[settings.loss_type]
    answers_of = answer_log_probabilities(fused_head=fused_head, sparse_head=sparse_head, dense_mask=dense_mask)
    if not needs_reference(settings):
        reference = None

    def units(batch: Batch) -> int:
        return _pairs(batch).count

    def reference_inputs(batches: Sequence[Batch]) -> Sequence[ReferenceLogps | None]:
        return reference(batches) if reference else [None] * len(batches)

    def log_ratios(*given: Any) -> tuple[AnswerLogProbabilities, Tensor, Tensor, Tensor | None]:
        """Return the answers, the two arguments of the loss function, and the mean log-ratios of each pair."""
        reference_input: ReferenceLogps | None = given[-1]
        answers = answers_of.loss_head(*given)
        if loss_kind.length_normalized:
            return answers, answers.chosen / answers.chosen_lengths, answers.rejected / answers.rejected_lengths, None
        chosen, rejected = answers.chosen, answers.rejected
        ratios = None
        if reference_input:
            chosen, rejected = chosen - reference_input[0], rejected - reference_input[1]
            ratios = (chosen + rejected).detach() / 2
        if settings.normalize_logps:
            mean = (answers.chosen_lengths + answers.rejected_lengths) / 2
            chosen, rejected = chosen * (mean / answers.chosen_lengths), rejected * (mean / answers.rejected_lengths)
        return answers, chosen, rejected, ratios

    def ratio_sums(*given: Any) -> LogRatioSums:
        _, chosen, rejected, _ = log_ratios(*given)
        return LogRatioSums(chosen.sum(), rejected.sum())

    def loss_with(kl_chosen: float, kl_rejected: float) -> DecoderLoss:
        def loss_head(
            decoder: Decoder, hidden_BSH: Tensor, shared: BatchContext, batch: Batch, reference_input: Any
        ) -> MicroBatchLoss:
            answers, chosen, rejected, ratios = log_ratios(decoder, hidden_BSH, shared, batch, reference_input)
            context = LossContext(settings, _offsets(settings, batch), kl_chosen, kl_rejected)
            preference_loss = loss_kind.function(chosen, rejected, context)
            loss_sum = settings.pref_loss_ratio * preference_loss.sum()
            sums = {"preference_loss": preference_loss.sum()}
            sft_weight = settings.pref_loss_ratio * loss_kind.sft_weight + settings.sft_loss_ratio
            if sft_weight:
                sums["sft_loss"] = -(answers.chosen / answers.chosen_lengths).sum()
                loss_sum = loss_sum + sft_weight * sums["sft_loss"]
            chosen, rejected = settings.beta * chosen.detach(), settings.beta * rejected.detach()
            sums |= {
                "reward_chosen": chosen.sum(),
                "reward_rejected": rejected.sum(),
                "reward_margin": (chosen - rejected).sum(),
                "reward_accuracy": (chosen > rejected).astype("float32").sum(),
                "logps_chosen": answers.chosen.sum(),
                "logps_rejected": answers.rejected.sum(),
            }
            if ratios is not None:
                sums["kl_to_reference"] = ratios.sum()
            return MicroBatchLoss(loss_sum, sums)

        return DecoderLoss(loss_head, units, dense_mask, reference_inputs)

    def loss_of_step(decoder: Decoder, batches: Iterable[Batch], ranks: Ranks) -> DecoderLoss:
        totals = np.zeros(3)  # the log-ratios of chosen answers, those of rejected answers, and the pairs
        forward = DecoderForward(ratio_sums, dense_mask, reference_inputs)
        batches = iter(batches)
        with eval_mode(decoder):
            while some := list(islice(batches, ranks.num_forward_batches)):
                found = ranks.forward_only(decoder, forward, some)
                for batch, sums in zip(some, found, strict=True):
                    totals += [float(sums["chosen"]), float(sums["rejected"]), units(batch)]
        chosen_sum, rejected_sum, pairs = ranks.sum(totals).tolist()
        return loss_with(max(0.0, chosen_sum / max(1, pairs)), max(0.0, rejected_sum / max(1, pairs)))

    return Objective(
        loss_with(0.0, 0.0),
        unit="pairs",
        loss_of_step=loss_of_step if loss_kind.needs_kl else None,
    )


def _pairs(batch: Batch) -> PairSpans:
    assert batch.pairs is not None, "a preference loss needs a batch of pairs"
    return batch.pairs


def _offsets(settings: DpoParameters, batch: Batch) -> Tensor | float:
    if not settings.offset_alpha:
        return 0.0
    scale = settings.offset_alpha / settings.beta
    return paddle.to_tensor((scale * np.log(_pairs(batch).score_differences)).astype(np.float32))
