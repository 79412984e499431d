"""The objective of stage RM: scores of two answers, of which the preferred one's should be the higher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.config.sections.reward_model import RewardModelParameters
from erniekit.data.batch import Batch, PairSpans
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective


class Scores(NamedTuple):
    """The scores behind the labelled tokens of a batch, in the order of rows and positions; fp32[T]."""

    values: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


class AnswerScores(NamedTuple):
    """The scores of both answers of P pairs; fp32[P] each."""

    chosen: Tensor
    rejected: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


def scores_at_labels(*, dense_mask: bool = False) -> DecoderForward[Scores]:
    """Build the forward pass that scores the tokens which have a label, whatever it is (`data.pairs.join_scored`)."""

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, reference_input: Any
    ) -> Scores:
        states_TH = decoder.head.tp.copy_to_tp(decoder.norm(hidden_BSH)).reshape([-1, hidden_BSH.shape[-1]])
        positions = np.flatnonzero(batch.labels != IGNORE_INDEX)
        if not len(positions):
            return Scores(decoder.head(states_TH[:1])[:0])  # still a function of the weights
        return Scores(decoder.head(paddle.gather(states_TH, paddle.to_tensor(positions))))

    return DecoderForward(loss_head, dense_mask)


def answer_scores(*, dense_mask: bool = False) -> DecoderForward[AnswerScores]:
    """Build the forward pass that scores the answers of a batch of pairs behind their last tokens."""
    scores_of = scores_at_labels(dense_mask=dense_mask)

    def loss_head(*given: Any) -> AnswerScores:
        (scores,) = scores_of.loss_head(*given)
        return AnswerScores(scores[0::2], scores[1::2])

    return DecoderForward(loss_head, dense_mask)


def reward_losses(
    chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | float = 0.0, centering: float = 0.0
) -> Tensor:
    """Return the loss of each pair, fp32[P]: -log s(r(w) - r(l) - m) + c (r(w) + r(l))^2, s the logistic function.

    Bradley and Terry 1952; margins m: Touvron et al. 2023 (Llama 2), arXiv:2307.09288, equation 2; the term that
    centres scores around 0: Eisenstein et al. 2023, arXiv:2312.09244, section 2.1. Rankings are their pairs: Ouyang et
    al. 2022 (InstructGPT), arXiv:2203.02155, equation 1.

    Args:
        chosen_P, rejected_P: the scores r(w) of preferred and r(l) of rejected answers, fp32[P].
        centering: c.
    """
    losses = -F.log_sigmoid(chosen_P - rejected_P - margins_P)
    return losses + centering * (chosen_P + rejected_P).square() if centering else losses


def reward_model(settings: RewardModelParameters, *, dense_mask: bool = False) -> Objective:
    """Build the objective of a reward model (`reward_losses`), averaged over the pairs of the step.

    Its metrics: `reward_chosen` and `reward_rejected`, the mean scores, `reward_margin`, their difference, and
    `reward_accuracy`, the share of pairs whose preferred answer has the higher score.
    """
    scores_of = answer_scores(dense_mask=dense_mask)

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, reference_input: Any
    ) -> MicroBatchLoss:
        chosen, rejected = scores_of.loss_head(decoder, hidden_BSH, context, batch, reference_input)
        margins: Tensor | float = 0.0
        if settings.margin_scale:
            differences = np.nan_to_num(_pairs(batch).score_differences, nan=0.0)
            margins = paddle.to_tensor((settings.margin_scale * differences).astype(np.float32))
        loss_sum = reward_losses(chosen, rejected, margins, settings.center_rewards_coefficient).sum()
        chosen, rejected = chosen.detach(), rejected.detach()
        return MicroBatchLoss(
            loss_sum,
            {
                "reward_chosen": chosen.sum(),
                "reward_rejected": rejected.sum(),
                "reward_margin": (chosen - rejected).sum(),
                "reward_accuracy": (chosen > rejected).astype("float32").sum(),
            },
        )

    return Objective(DecoderLoss(loss_head, lambda batch: _pairs(batch).count, dense_mask), unit="pairs")


def _pairs(batch: Batch) -> PairSpans:
    assert batch.pairs is not None, "a reward model needs a batch of pairs"
    return batch.pairs
