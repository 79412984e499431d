"""Losses over pairs of a preferred and a rejected answer, one plain function each, and the table of them.

Notation: x a prompt, w and l its chosen and rejected answer, |y| the tokens of an answer with the end of its turn,
log p(y|x) the sum over them under the trained model, log q(y|x) under the reference, s the logistic function, and

    r(y) = log p(y|x) - log q(y|x)        the log-ratio of an answer (q counts as 1 with `reference_free`)
    a(y) = log p(y|x) / |y|               its mean log-probability

A function takes r or a of both answers, fp32[pairs], as the table says, and gives the loss of every pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.config.sections.dpo import REFERENCE_FREE_LOSSES, DpoParameters

CERTAIN = -1e-7  # the mean log-probability from which ORPO's odds stop growing: above it they leave fp32's range


class LossContext(NamedTuple):
    """What some losses need beside the answers.

    Attributes:
        offsets: fp32[pairs], what r(w) - r(l) must exceed: ODPO's alpha / beta x log(score difference).
        kl_chosen, kl_rejected: KTO's estimates of the divergence from the reference, over the whole step, at least 0.
    """

    settings: DpoParameters
    offsets: Tensor | float = 0.0
    kl_chosen: float = 0.0
    kl_rejected: float = 0.0


def sigmoid(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """-(1 - e) log s(h) - e log s(-h) with h = beta (r(w) - r(l)) and e the label smoothing.

    DPO: Rafailov et al. 2023, arXiv:2305.18290, equation 7; with e > 0 its conservative form, Mitchell 2023. An offset
    is subtracted from r(w) - r(l): ODPO, Amini et al. 2024, arXiv:2402.10571.
    """
    return _smoothed(context.settings.beta * (chosen - rejected - context.offsets), context)


def robust(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """(-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e) with h = beta (r(w) - r(l)), unbiased under exchanged labels.

    rDPO: Chowdhury et al. 2024, arXiv:2403.00409.
    """
    settings = context.settings
    noise = settings.label_smoothing
    logits = settings.beta * (chosen - rejected - context.offsets)
    return (-(1 - noise) * F.log_sigmoid(logits) + noise * F.log_sigmoid(-logits)) / (1 - 2 * noise)


def hinge(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """max(0, 1 - beta (r(w) - r(l))).

    RSO: Liu et al. 2023, arXiv:2309.06657; SLiC's hinge (Zhao et al. 2023, arXiv:2305.10425) with a reference in it.
    """
    return F.relu(1 - context.settings.beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """(r(w) - r(l) - 1 / (2 beta))^2, beta being the paper's tau.

    Azar et al. 2023, arXiv:2310.12036, equation 17, over whole answers as there; trl takes means over tokens.
    """
    return (chosen - rejected - 1 / (2 * context.settings.beta)).square()


def kto_pair(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """(1 - s(beta (r(w) - z(l))) + 1 - s(beta (z(w) - r(l)))) / 2, the mean of a pair's two examples.

    Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, equation 8, on pairs: z is max(0, mean r) over the chosen or the
    rejected answers of the whole step and counts as a constant; each half is compared with the z of the other.
    """
    beta = context.settings.beta  # 1 - s(h) as s(-h), which keeps its digits, and its gradient, where s(h) is near 1
    return 0.5 * (F.sigmoid(beta * (context.kl_rejected - chosen)) + F.sigmoid(beta * (rejected - context.kl_chosen)))


def dpop(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """-log s(beta (r(w) - r(l) - lambda max(0, -r(w)))): the chosen answer may not become less likely.

    DPO-positive: Pal et al. 2024, arXiv:2402.13228.
    """
    settings = context.settings
    penalty = settings.dpop_lambda * F.relu(-chosen)
    return -F.log_sigmoid(settings.beta * (chosen - rejected - penalty))


def sppo_hard(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """(r(w) - 1 / (2 beta))^2 + (r(l) + 1 / (2 beta))^2.

    SPPO: Wu et al. 2024, arXiv:2405.00675, equation 4.7 with eta = 1 / beta and certain winners.
    """
    goal = 1 / (2 * context.settings.beta)
    return (chosen - goal).square() + (rejected + goal).square()


def nca_pair(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """-log s(beta r(w)) - (log s(-beta r(w)) + log s(-beta r(l))) / 2.

    NCA: Chen et al. 2024, arXiv:2402.05369, for pairs, of which one answer is right and one wrong.
    """
    won, lost = context.settings.beta * chosen, context.settings.beta * rejected
    return -F.log_sigmoid(won) - 0.5 * (F.log_sigmoid(-won) + F.log_sigmoid(-lost))


def simpo(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """-log s(beta (a(w) - a(l)) - gamma), smoothed as `sigmoid` is.

    SimPO: Meng et al. 2024, arXiv:2405.14734, equation 6.
    """
    settings = context.settings
    return _smoothed(settings.beta * (chosen - rejected) - settings.simpo_gamma, context)


def orpo(chosen: Tensor, rejected: Tensor, context: LossContext) -> Tensor:
    """-beta log s(log odds(w) - log odds(l)) with odds = exp(a) / (1 - exp(a)); beta is the paper's lambda.

    ORPO: Hong et al. 2024, arXiv:2403.07691, equations 4 and 7. Its equation 6 adds the SFT loss of the chosen answer
    (`PreferenceLoss.sft_weight`).
    """

    def log_odds(mean: Tensor) -> Tensor:
        mean = mean.clip(max=CERTAIN)
        return mean - paddle.log(-paddle.expm1(mean))  # log(1 - exp(mean)) has no digits left near 0

    return -context.settings.beta * F.log_sigmoid(log_odds(chosen) - log_odds(rejected))


def _smoothed(logits: Tensor, context: LossContext) -> Tensor:
    noise = context.settings.label_smoothing
    loss = -F.log_sigmoid(logits)
    return loss if noise == 0 else (1 - noise) * loss - noise * F.log_sigmoid(-logits)


@dataclass(frozen=True)
class PreferenceLoss:
    """A function of the table.

    Attributes:
        length_normalized: it takes a(y), and needs no reference; otherwise r(y).
        sft_weight: of the SFT loss of the chosen answer that belongs to it.
        needs_kl: it needs `kl_chosen` and `kl_rejected`.
    """

    function: Callable[[Tensor, Tensor, LossContext], Tensor]
    length_normalized: bool = False
    sft_weight: float = 0.0
    needs_kl: bool = False


LOSSES = {
    "sigmoid": PreferenceLoss(sigmoid),
    "robust": PreferenceLoss(robust),
    "hinge": PreferenceLoss(hinge),
    "ipo": PreferenceLoss(ipo),
    "kto_pair": PreferenceLoss(kto_pair, needs_kl=True),
    "dpop": PreferenceLoss(dpop),
    "sppo_hard": PreferenceLoss(sppo_hard),
    "nca_pair": PreferenceLoss(nca_pair),
    "simpo": PreferenceLoss(simpo, length_normalized=True),
    "orpo": PreferenceLoss(orpo, length_normalized=True, sft_weight=1.0),
}
assert {name for name, loss in LOSSES.items() if loss.length_normalized} == set(REFERENCE_FREE_LOSSES)


def needs_reference(settings: DpoParameters) -> bool:
    """Whether the loss compares with a reference."""
    return not (settings.reference_free or LOSSES[settings.loss_type].length_normalized)
