"""The objective of policy gradients: the loss of sampled answers (`policy_losses`), and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.errors import TrainingError
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import IGNORE_INDEX, token_log_probabilities
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.metrics import UNITS
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.policy_losses import (
    KL_ESTIMATORS,
    LOSSES,
    Clip,
    Level,
    clipped_losses,
    token_weights,
)
from erniekit.training.objectives.reference import ComputeLogps, ReferenceLogps, eval_mode

ROLLOUT = "rollout/"  # begins the names of what a checkpoint holds of the answers that are being learned from
SAMPLING_GAP = 0.3  # of a token's log-probability, at sampling and in training, on average: beyond it weights differ
RATIO_TOLERANCE = 1e-3  # of a log-ratio that must be 0, in float32
RATIO_TOLERANCE_16_BITS = 0.1


class TokenLogps(NamedTuple):
    """The log-probabilities of the tokens of sampled answers, fp32 [T], in the order of positions."""

    values: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return {"values": self.values}


class PolicySettings(NamedTuple):
    """What the objective is made with.

    Attributes:
        loss_type: one of `policy_losses.LOSSES`.
        clip: how far a ratio may leave 1.
        sequence_level: whether the ratio is that of an answer where the loss leaves the choice.
        longest: the most tokens of an answer.
        temperature: by which the logits are divided.
        beta, kl_estimator: the weight of the divergence from the reference in the loss, and its estimator.
        figures: the names of the columns of `answer_figures`.
        tolerance: how far the log-ratio of the first update may be from 0.
    """

    loss_type: str
    clip: Clip
    longest: int
    sequence_level: bool = False
    temperature: float = 1.0
    beta: float = 0.0
    kl_estimator: str = "k3"
    figures: Sequence[str] = ()
    tolerance: float = RATIO_TOLERANCE

    @property
    def level(self) -> Level:
        """What the ratio is that of."""
        own = LOSSES[self.loss_type].level
        return "mean" if own == "token" and self.sequence_level else own

    @property
    def kl_in_loss(self) -> bool:
        """Whether the divergence is added to the loss."""
        return bool(self.beta) and not LOSSES[self.loss_type].kl_in_reward


def answer_token_logps(
    temperature: float = 1.0, *, fused_head: bool = False, sparse_head: bool = False, dense_mask: bool = False
) -> DecoderForward[TokenLogps]:
    """Build the forward pass that computes log softmax(logits / temperature)[token] of each token of the answers."""

    def loss_head(decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: Any) -> TokenLogps:
        states_BSH = decoder.norm(hidden_BSH)
        if temperature != 1.0:
            states_BSH = states_BSH / temperature  # the head is linear, so its logits are divided
        labels = paddle.to_tensor(batch.labels)
        tokens = token_log_probabilities(decoder, states_BSH, labels, fused=fused_head, sparse=sparse_head)
        return TokenLogps(tokens.values)

    return DecoderForward(loss_head, dense_mask)


def measure_logps(forward: DecoderForward[TokenLogps], ranks: Ranks = SINGLE_PROCESS) -> ComputeLogps:
    """Return the function that computes the log-probabilities of the tokens of batches without gradients."""

    def measure(model: Decoder, batches: Sequence[Batch]) -> Sequence[ReferenceLogps]:
        with eval_mode(model):
            return [(paddle.to_tensor(found["values"]),) for found in ranks.forward_only(model, forward, batches)]

    return measure


def policy(
    settings: PolicySettings,
    *,
    is_first_update: Callable[[], bool] = lambda: False,
    fused_head: bool = False,
    sparse_head: bool = False,
    dense_mask: bool = False,
) -> Objective:
    """Build the objective of sampled answers.

    Batches have `answer_of`, `advantages`, `sampled_logps` and `answer_figures`, and where they are learned from more
    than once `old_logps`; without it the ratio is 1 and carries the gradient alone. Answers without labels are left out
    of the loss, and of what it is divided by.

    Its metrics: the columns of `answer_figures`, per answer; per token `entropy`, estimated by -log p of the sampled
    tokens; `clip_low` and `clip_high`, the share of tokens whose gradient the clip has ended; with a reference `kl`;
    and `sampling_gap`, by how much the log-probabilities of the sampled tokens differ from those at sampling, while the
    weights are still the same.

    Args:
        is_first_update: whether the weights are those that the answers were sampled from. Then the ratio of every token
            must be 1, and that at sampling nearly so.

    Raises:
        TrainingError: (from the loss) they are not.
    """
    form = LOSSES[settings.loss_type]
    forward = answer_token_logps(
        settings.temperature, fused_head=fused_head, sparse_head=sparse_head, dense_mask=dense_mask
    )

    def units(batch: Batch) -> int:
        return batch.target_count if form.weight == "token" else len(np.unique(_answers(batch)))

    def loss_head(
        decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, reference_input: Any
    ) -> MicroBatchLoss:
        logps = forward.loss_head(decoder, hidden_BSH, context, batch, reference_input).values
        answers = paddle.to_tensor(np.unique(_answers(batch), return_inverse=True)[1].reshape(-1))
        old = _at_labels(batch, "old_logps") if "old_logps" in batch.arrays else logps.detach()
        sampled, advantages = _at_labels(batch, "sampled_logps"), _at_labels(batch, "advantages")
        first = is_first_update()
        if first:
            _check_ratio(logps.detach(), old, settings.tolerance)
            _check_sampling(logps.detach(), sampled)
        tokens = clipped_losses(logps, old, advantages, answers, clip=settings.clip, level=settings.level)
        losses = tokens.losses
        count = paddle.to_tensor(float(len(sampled)))
        sums = {"clip_low": tokens.clipped_low, "clip_high": tokens.clipped_high, "entropy": -sampled}
        gaps = (logps.detach() - sampled).abs()
        if settings.kl_in_loss:
            sums["kl"] = KL_ESTIMATORS[settings.kl_estimator](logps, _at_labels(batch, "reference_logps"))
            losses = losses + settings.beta * sums["kl"]
        elif "reference_logps" in batch.arrays:
            sums["kl"] = KL_ESTIMATORS[settings.kl_estimator](logps, _at_labels(batch, "reference_logps"))
        loss_sum = (losses * token_weights(answers, form.weight, settings.longest)).sum()
        metrics: dict[str, Tensor] = {}
        for name, values in sums.items():
            metrics |= {name: values.detach().astype("float32").sum(), name + UNITS: count}
        metrics |= {"sampling_gap": gaps.sum() * float(first), "sampling_gap" + UNITS: count * float(first)}
        figures = batch.arrays["answer_figures"]
        for column, name in enumerate(settings.figures):
            total = paddle.to_tensor(figures[:, column].sum(dtype=np.float64).astype(np.float32))
            metrics |= {name: total, name + UNITS: paddle.to_tensor(float(len(figures)))}
        return MicroBatchLoss(loss_sum, metrics)

    return Objective(DecoderLoss(loss_head, units, dense_mask), "tokens" if form.weight == "token" else "answers")


def _answers(batch: Batch) -> np.ndarray:
    """Return the number of each token's answer, int64 [T]."""
    return batch.arrays["answer_of"][batch.labels != IGNORE_INDEX].astype(np.int64)


def _at_labels(batch: Batch, name: str) -> Tensor:
    """Return the values of an array at the positions that have a label, fp32 [T]."""
    return paddle.to_tensor(batch.arrays[name][batch.labels != IGNORE_INDEX])


def _check_ratio(logps: Tensor, old: Tensor, tolerance: float) -> None:
    """Raise TrainingError unless the ratio of every token is 1."""
    furthest = float((logps - old).abs().max()) if logps.shape[0] else 0.0
    if not furthest <= tolerance:
        raise TrainingError(
            f"the ratio of the first update must be 1, and a token's log-ratio is {furthest:.3g}: the weights have "
            "changed since the answers were sampled, or the forward pass is not repeatable\n"
            "  Resume from the newest checkpoint; if it happens again, please report it."
        )


def _check_sampling(logps: Tensor, sampled: Tensor) -> None:
    """Raise TrainingError if tokens have other probabilities in training than where they were sampled."""
    gap = float((logps - sampled).abs().mean()) if logps.shape[0] else 0.0
    if not gap <= SAMPLING_GAP:
        raise TrainingError(
            f"the log-probability of a sampled token differs by {gap:.3g} on average from that in training: the "
            "answers are not those of the weights that are being trained\n  Please report this."
        )
