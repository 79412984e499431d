"""The objective of preference training: from packed pairs to the loss of each pair and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.config.sections.dpo import DpoParameters
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import token_log_probabilities
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.preference_losses import LOSSES, LossContext, needs_reference
from erniekit.training.objectives.reference import ComputeLogps, Reference, ReferenceLogps, eval_mode


class AnswerLogProbabilities(NamedTuple):
    """Of the P pairs of a batch: summed log-probabilities of the answers, and how many tokens they have; fp32[P]."""

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor


def answer_log_probabilities(
    *, fused_head: bool = False, sparse_head: bool = False, dense_mask: bool = False
) -> DecoderForward[AnswerLogProbabilities]:
    """The sums over each answer's labels. Multi-token prediction layers have no part in it."""

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Any, reference_input: Any
    ) -> AnswerLogProbabilities:
        labels = paddle.to_tensor(batch.labels)
        states_BSH = decoder.norm(hidden_BSH)
        tokens = token_log_probabilities(decoder, states_BSH, labels, fused=fused_head, sparse=sparse_head)
        if not batch.pairs.count:
            nothing = tokens.values  # [0], still a function of the weights
            return AnswerLogProbabilities(nothing, nothing, nothing.detach(), nothing.detach())
        answers = batch.pairs.answers[batch.pairs.answers >= 0]  # in the order of positions, as `tokens` are
        # float64: a sum over thousands of tokens in float32 loses the digits that the loss is made of
        sums = paddle.geometric.segment_sum(tokens.values.astype("float64"), paddle.to_tensor(answers))
        sums = sums.astype(tokens.values.dtype)
        lengths = paddle.to_tensor(np.bincount(answers, minlength=2 * batch.pairs.count)).astype(sums.dtype)
        return AnswerLogProbabilities(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2])

    return DecoderForward(loss_head, dense_mask)


def reference_logps_function(
    answers: DecoderForward[AnswerLogProbabilities], ranks: Ranks = SINGLE_PROCESS
) -> ComputeLogps:
    """What a reference measures with."""
    sums = answers.map(lambda found: {"chosen": found.chosen, "rejected": found.rejected})

    def measure(model: Decoder, batches: Sequence[Any]) -> Sequence[ReferenceLogps]:
        found = ranks.forward_only(model, sums, batches)
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
    """A loss over pairs (`preference_losses`), averaged over the pairs of the step.

    Its figures: `preference_loss`, `sft_loss` where it counts, `reward_chosen`, `reward_rejected`, `reward_margin`,
    `reward_accuracy` (chosen above rejected), `logps_chosen`, `logps_rejected` (sums over an answer), and with a
    reference `kl_to_reference`: the mean log-ratio of both answers, which estimates the divergence from the reference
    as far as the answers are like the model's own.

    Args:
        reference: None counts its log-probabilities as 0.
    """
    loss_kind = LOSSES[settings.loss_type]
    answers_of = answer_log_probabilities(fused_head=fused_head, sparse_head=sparse_head, dense_mask=dense_mask)
    if not needs_reference(settings):
        reference = None

    def units(batch: Any) -> int:
        return batch.pairs.count

    def reference_inputs(batches: Sequence[Any]) -> Sequence[ReferenceLogps | None]:
        return reference(batches) if reference else [None] * len(batches)

    def log_ratios(*given: Any) -> tuple[AnswerLogProbabilities, Tensor, Tensor, Tensor | None]:
        """The answers, what the loss function takes of them, and the log-ratios as they are."""
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

    def ratio_sums(*given: Any) -> Mapping[str, Tensor]:
        _, chosen, rejected, _ = log_ratios(*given)
        return {"chosen": chosen.sum(), "rejected": rejected.sum()}

    def loss_with(kl_chosen: float, kl_rejected: float) -> DecoderLoss:
        def loss_head(
            decoder: Decoder, hidden_BSH: Tensor, shared: BatchContext, batch: Any, reference_input: Any
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

        return DecoderLoss(DecoderForward(loss_head, dense_mask, reference_inputs), units)

    def loss_of_step(decoder: Decoder, batches: Iterable[Any], ranks: Ranks) -> DecoderLoss:
        totals = np.zeros(3)  # of the chosen answers' log-ratios, of the rejected ones', and of pairs
        batches = iter(batches)
        with eval_mode(decoder):
            while some := list(islice(batches, ranks.num_forward_batches)):
                found = ranks.forward_only(decoder, DecoderForward(ratio_sums, dense_mask, reference_inputs), some)
                for batch, sums in zip(some, found, strict=True):
                    totals += [sums["chosen"], sums["rejected"], batch.pairs.count]
        chosen_sum, rejected_sum, pairs = ranks.sum(totals).tolist()
        return loss_with(max(0.0, chosen_sum / max(1, pairs)), max(0.0, rejected_sum / max(1, pairs)))

    return Objective(
        loss_with(0.0, 0.0),
        units,
        unit="pairs",
        loss_of_step=loss_of_step if loss_kind.needs_kl else None,
    )


def _offsets(settings: DpoParameters, batch: Any) -> Tensor | float:
    if not settings.offset_alpha:
        return 0.0
    scale = settings.offset_alpha / settings.beta
    return paddle.to_tensor((scale * np.log(batch.pairs.score_differences)).astype(np.float32))
