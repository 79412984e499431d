"""The objective of stage KTO: the loss of single answers with a verdict, from packed samples.

Notation: x a prompt, y the answer to it, y' an answer to another prompt, s the logistic function, and

    r(x, y) = log p(y|x) - log q(y|x)      the log-ratio of an answer under the trained model and the reference
    z = max(0, mean r(x, y'))              the divergence from the reference, over the records of the whole step

A sample is a prompt with the answers y and y' (`data.pairs`); its score difference is the verdict on y.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.config.sections.kto import KtoParameters
from erniekit.data.batch import Batch, PairSpans
from erniekit.data.pairs import first_answers
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.training.collectives import Ranks
from erniekit.training.metrics import UNITS
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, MicroBatchLoss, ReferenceInputs
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.preference import AnswerLogProbabilities, answer_log_probabilities
from erniekit.training.objectives.reference import Reference, ReferenceLogps, eval_mode


class LogRatios(NamedTuple):
    """r of the answers of P records, and of the answers to other prompts; fp32[P] each."""

    own: Tensor
    other: Tensor

    def named_tensors(self) -> Mapping[str, Tensor]:
        return self._asdict()


def kto_losses(
    ratios_P: Tensor, desirable_P: Tensor, divergence: float, beta: float, weights: tuple[float, float]
) -> Tensor:
    """Return the loss of each record, fp32[P]: a (1 - s(beta (r - z))) of desirable answers, b (1 - s(beta (z - r)))
    of the others.

    Ethayarajh et al. 2024 (KTO), arXiv:2402.01306, equation 8.

    Args:
        ratios_P: r, fp32[P].
        desirable_P: fp32[P]; 1 where the verdict is desirable, 0 where it is not.
        divergence: z, which counts as a constant.
        weights: a and b, the paper's lambda_D and lambda_U.
    """
    signs = 2 * desirable_P - 1
    losses = F.sigmoid(
        beta * signs * (divergence - ratios_P)
    )  # 1 - s(h) as s(-h), which keeps its digits near s(h) = 1
    return (weights[0] * desirable_P + weights[1] * (1 - desirable_P)) * losses


def shares_below(rewards_P: np.ndarray, undesirable_N: np.ndarray) -> np.ndarray:
    """Return for each reward the share of N rewards that are lower, equal ones counting half: float64[P].

    Its mean over desirable answers is the area under the curve of true against false positives (AUC).

    Args:
        undesirable_N: rewards in ascending order, at least one.
    """
    below = np.searchsorted(undesirable_N, rewards_P, "left") + np.searchsorted(undesirable_N, rewards_P, "right")
    return below / (2 * len(undesirable_N))


def verdicts(
    settings: KtoParameters,
    beta: float,
    reference: Reference | None,
    *,
    fused_head: bool = False,
    sparse_head: bool = False,
    dense_mask: bool = False,
    multiple_of: int = 1,
) -> Objective:
    """Build the objective of KTO (`kto_losses`), averaged over the records of the step.

    z is that of all records of the step, over micro-batches and ranks, from a forward pass without gradients and
    dropout; in an evaluation it is that of all records which are evaluated. The pass with gradients reads only x and y,
    and the reference is asked once for both.

    Its metrics: `reward_desirable` and `reward_undesirable`, the means of beta r over these answers, `kl` (z before it
    is cut at 0), `logps` (of a whole answer), and in an evaluation `reward_auc`: the probability that a desirable
    answer has a higher reward than an undesirable one, over all of them; of one source of several its desirable
    answers against the undesirable ones of all.

    Args:
        reference: where it is None, its log-probabilities count as 0.
        multiple_of: the length of rows is a multiple of it.
    """
    answers_of = answer_log_probabilities(fused_head=fused_head, sparse_head=sparse_head, dense_mask=dense_mask)
    weights = (settings.desirable_weight, settings.undesirable_weight)

    def units(batch: Batch) -> int:
        return _answers(batch).count

    def reference_inputs(batches: Sequence[Batch]) -> Sequence[ReferenceLogps | None]:
        return reference(batches) if reference else [None] * len(batches)

    def log_ratios(*given: Any) -> tuple[LogRatios, AnswerLogProbabilities]:
        reference_input: ReferenceLogps | None = given[-1]
        answers = answers_of.loss_head(*given)
        own, other = answers.chosen, answers.rejected
        if reference_input:
            own, other = own - reference_input[0], other - reference_input[1]
        return LogRatios(own, other), answers

    def loss_with(
        mean_other: float, undesirable_rewards: np.ndarray | None, said: ReferenceInputs = reference_inputs
    ) -> DecoderLoss:
        def loss_head(
            decoder: Decoder, hidden_BSH: Tensor, shared: BatchContext, batch: Batch, reference_input: Any
        ) -> MicroBatchLoss:
            ratios, answers = log_ratios(decoder, hidden_BSH, shared, batch, reference_input)
            is_desirable = _answers(batch).score_differences > 0
            desirable = paddle.to_tensor(is_desirable.astype(np.float32))
            loss_sum = kto_losses(ratios.own, desirable, max(0.0, mean_other), beta, weights).sum()
            rewards = beta * ratios.own.detach()
            counts = paddle.to_tensor(float(is_desirable.sum())), paddle.to_tensor(float((~is_desirable).sum()))
            sums = {
                "reward_desirable": (rewards * desirable).sum(),
                f"reward_desirable{UNITS}": counts[0],
                "reward_undesirable": (rewards * (1 - desirable)).sum(),
                f"reward_undesirable{UNITS}": counts[1],
                "kl": paddle.to_tensor(mean_other * len(is_desirable)),
                "logps": answers.chosen.detach().sum(),
            }
            if undesirable_rewards is not None and len(undesirable_rewards):
                shares = shares_below(rewards.numpy()[is_desirable], undesirable_rewards)
                sums |= {"reward_auc": paddle.to_tensor(shares.sum()), f"reward_auc{UNITS}": counts[0]}
            return MicroBatchLoss(loss_sum, sums)

        return DecoderLoss(loss_head, units, dense_mask, said)

    def loss_of_step(decoder: Decoder, batches: Iterable[Batch], ranks: Ranks) -> DecoderLoss:
        evaluates = not decoder.training
        totals = np.zeros(2)  # r of the answers to other prompts, and the records
        rewards: list[float] = []  # of the undesirable answers of an evaluation
        known: dict[Any, ReferenceLogps | None] = {}  # by the records of a micro-batch

        def ask(some: Sequence[Batch]) -> Sequence[ReferenceLogps | None]:
            found = reference_inputs(some)
            known.update(zip((batch.samples for batch in some), found, strict=True))
            return found

        def recall(some: Sequence[Batch]) -> Sequence[ReferenceLogps | None]:
            return [known[batch.samples] for batch in some]

        forward = DecoderForward(lambda *given: log_ratios(*given)[0], dense_mask, ask)
        batches = iter(batches)
        with eval_mode(decoder):
            while some := list(islice(batches, ranks.num_forward_batches)):
                found = ranks.forward_only(decoder, forward, some)
                for batch, ratios in zip(some, found, strict=True):
                    totals += [float(ratios["other"].astype(np.float64).sum()), units(batch)]
                    if evaluates:
                        undesirable = ratios["own"][_answers(batch).score_differences < 0]
                        rewards += (np.float32(beta) * undesirable.astype(np.float32)).tolist()
        other_sum, records = ranks.sum(totals).tolist()
        if not evaluates:
            return loss_with(other_sum / max(1, records), None, recall)
        # Ranks that share the model all have the same rewards, so that each counts equally often.
        everywhere = np.sort(np.array([value for own in ranks.all_gather_object(rewards) for value in own], np.float32))
        return loss_with(other_sum / max(1, records), everywhere, recall)

    return Objective(
        loss_with(0.0, None),
        unit="answers with a verdict",
        loss_of_step=loss_of_step,
        part_for_loss=lambda batch: first_answers(batch, multiple_of),
    )


def _answers(batch: Batch) -> PairSpans:
    assert batch.pairs is not None, "KTO needs a batch of answers with verdicts"
    return batch.pairs
