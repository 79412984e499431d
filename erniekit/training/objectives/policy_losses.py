"""Losses of policy gradients: the clipped ratio of an answer's tokens, and estimators of the divergence.

Notation: A answers with T tokens in all, |o| the tokens of one of them with the end of its turn, log p the
log-probability of a token under the trained model, log b under the model that sampled it, log q under the reference,
all of the distribution that tokens are sampled from (logits divided by the temperature), a the advantage of a token.

    w = p / b                                     the ratio of a token
    loss = -min(w a, clip(w, 1 - low, 1 + high) a)

PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. What the six losses differ in is in the table `LOSSES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import paddle
from paddle import Tensor

Level = Literal["token", "mean", "sum"]
Weight = Literal["answer", "token", "length"]


@dataclass(frozen=True)
class PolicyLoss:
    """What a loss does with the ratios and losses of tokens.

    Attributes:
        weight: what the loss is averaged over: `answer`, the mean over an answer's tokens and then over answers;
            `token`, all tokens of the step alike; `length`, the sum over an answer's tokens, divided by the longest
            length that an answer may have, and then the mean over answers.
        level: of the ratio: of each `token`; of the whole answer, as the exponential of the `mean` of its tokens'
            log-ratios, or of their `sum`, which is the ratio of the answers' probabilities.
        kl_in_reward: whether the divergence from the reference is taken from the reward, and not added to the loss.
    """

    weight: Weight
    level: Level = "token"
    kl_in_reward: bool = False


LOSSES = {
    "grpo": PolicyLoss("answer"),  # Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, equation 3
    "dr_grpo": PolicyLoss("length"),  # Liu et al. 2025, arXiv:2503.20783, section 3.2
    "dapo": PolicyLoss("token"),  # Yu et al. 2025, arXiv:2503.14476, equation 8
    "gspo": PolicyLoss("answer", level="mean"),  # Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7
    "rloo": PolicyLoss("answer", level="sum", kl_in_reward=True),  # Ahmadian et al. 2024, arXiv:2402.14740, equation 8
    "reinforce++": PolicyLoss("token", kl_in_reward=True),  # Hu et al. 2025, arXiv:2501.03262
}


class Clip(NamedTuple):
    """How far a ratio may leave 1 before a token's gradient ends.

    Attributes:
        low, high: a ratio below 1 - low counts as that where the advantage is negative, one above 1 + high where it
            is positive. DAPO ("clip-higher") has a larger `high`.
        maximum: the largest ratio of a token with a negative advantage, 0 for none: the second side, without which
            such a token's loss has no bound. Ye et al. 2020, arXiv:1912.09729, equation 3; trl's `delta`.
    """

    low: float
    high: float
    maximum: float = 0.0


class TokenLosses(NamedTuple):
    """The losses of T tokens.

    Attributes:
        losses: fp32 or fp64 [T]; carries the gradient.
        log_ratio: [T], log w of each token, or of its answer; detached.
        clipped_low, clipped_high: bool [T], whether the clip has ended a token's gradient below or above.
    """

    losses: Tensor
    log_ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_losses(
    logps: Tensor, sampled_logps: Tensor, advantages: Tensor, answers: Tensor, *, clip: Clip, level: Level = "token"
) -> TokenLosses:
    """Return -min(w a, clip(w) a) of each token.

    Args:
        logps: [T], log p; carries the gradient.
        sampled_logps: [T], log b.
        advantages: [T].
        answers: int64 [T], the number of each token's answer, from 0 and never falling.
        level: what w is the ratio of, see `PolicyLoss`.
    """
    log_ratio = logps - sampled_logps
    if level != "token":
        log_ratio = per_answer(log_ratio, answers, mean=level == "mean")
    ratio = paddle.exp(log_ratio)
    within = paddle.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    bounded = paddle.clip(ratio, max=clip.maximum) if clip.maximum else ratio
    losses = -paddle.minimum(bounded * advantages, within * advantages)
    low, high = (ratio < 1.0 - clip.low) & (advantages < 0), (ratio > 1.0 + clip.high) & (advantages > 0)
    return TokenLosses(losses, log_ratio.detach(), low, high)


def per_answer(values: Tensor, answers: Tensor, *, mean: bool) -> Tensor:
    """Return for each of T tokens the sum of `values` over its answer, or their mean.

    The sum is taken in float64: over thousands of tokens float32 loses the digits that a ratio near 1 is made of.
    """
    if not values.shape[0]:
        return values
    wide = values.astype("float64")
    totals = paddle.geometric.segment_mean(wide, answers) if mean else paddle.geometric.segment_sum(wide, answers)
    return paddle.gather(totals, answers).astype(values.dtype)


def token_weights(answers: Tensor, weight: Weight, longest: int, dtype: str = "float32") -> Tensor:
    """Return the weight of each of T tokens in the sum that the step divides by its answers, or by its tokens.

    Args:
        answers: int64 [T], the number of each token's answer, from 0 and never falling.
        weight: see `PolicyLoss`; the step divides by the tokens where it is `token`, else by the answers.
        longest: the most tokens of an answer.
    """
    ones = paddle.ones(answers.shape, dtype)
    if weight == "token":
        return ones
    if weight == "length":
        return ones / longest
    return ones / per_answer(ones, answers, mean=False)


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """log p - log q: unbiased, of either sign. Schulman 2020, "Approximating KL Divergence"."""
    return logps - reference_logps


def k2(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, with little variance; its gradient is that of the divergence itself."""
    return 0.5 * (logps - reference_logps).square()


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """q / p - 1 - log(q / p): unbiased and never negative. DeepSeekMath, equation 4."""
    log_ratio = reference_logps - logps
    return paddle.exp(log_ratio) - log_ratio - 1.0


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
