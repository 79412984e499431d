"""The objectives of models that speak: the codes of recordings, whose levels and parts have denominators of their own.

A mean of each level (masked codes) or of each part (AR and NAR) is a mean over the whole step, all micro-batches and
ranks, so how samples are packed, accumulated and divided among ranks changes nothing. `loss_of_step` counts the labels
of the step, without the model, and gives every sum a factor; dividing by the units of the step, as for any loss, then
gives the formula of the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.data.batch import Batch, CodePart, CodeTargets
from erniekit.model.code_layers import level_losses
from erniekit.model.decoder import Decoder
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.head import IGNORE_INDEX, TokenLoss
from erniekit.training.collectives import Ranks
from erniekit.training.metrics import UNITS
from erniekit.training.objectives.forward import DecoderLoss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective

UNIT = "target codes"


def masked_codes(weights: Sequence[float], *, fused_head: bool = False, dense_mask: bool = False) -> Objective:
    """Build the loss of masked codes: sum_c w_c S_c / N_c over the levels c.

    S_c is the summed negative log-likelihood of the masked codes of level c in the whole step, N_c their number, and w
    the weights divided by their sum. A level without a masked code adds 0. OmniVoice's trainer takes this mean in each
    micro-batch of each rank and averages the means; with one micro-batch both are the same.

    Its metrics: `loss_c` and `accuracy_c` of each level, per code of that level, and `code_accuracy` over all codes.

    Args:
        weights: one for each level, not all 0.
        fused_head: compute heads and losses in chunks, so that the logits of a long pack never exist as a whole.
        dense_mask: compute attention with a dense mask made from the FlashMask indices.
    """
    shares = np.array(weights, np.float64) / np.sum(weights)

    def loss_with(factors: np.ndarray) -> DecoderLoss:
        def loss_head(
            decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: None
        ) -> MicroBatchLoss:
            losses = level_losses(decoder, decoder.norm(hidden_BSH), _targets(batch).labels, fused=fused_head)
            return MicroBatchLoss(_weighted(losses, factors), _metrics_of_levels(losses))

        return DecoderLoss(loss_head, _units, dense_mask)

    def loss_of_step(decoder: Decoder, batches: Iterable[Batch], ranks: Ranks) -> DecoderLoss:
        counts, units = _over_step(batches, ranks, len(shares), lambda batch: _targets(batch).counts)
        return loss_with(shares * units / np.maximum(counts, 1))

    equally_many = shares * len(shares)  # the factors of a step with as many codes of each level
    return Objective(loss_with(equally_many), UNIT, loss_of_step=loss_of_step)


def ar_nar_codes(
    level_factors: Sequence[float],
    loss_factors: tuple[float, float, float],
    *,
    fused_head: bool = False,
    dense_mask: bool = False,
) -> Objective:
    """Build the loss of AR and NAR codes: f_r / N_r sum_l w_l S_l + f_p / N_p S_p + f_t / N_t S_t + S_s / N_s.

    S are summed negative log-likelihoods of the whole step, N the numbers of labels in them, f the loss factors and w
    the level factors. r is the response, whose levels l are averaged together, so `codebook_sampling` decides how often
    each level counts; p the acoustic prompt, t the text before a response, and s the transcript of the task `stt`. A
    part without labels adds 0. VALL-E's trainer averages in each sample and then over samples; this is per code.

    Its metrics: `loss_l` and `accuracy_l` of each level of responses, per code of that level, `code_accuracy` over all
    of them, and `text_accuracy` over the tokens of texts and transcripts.

    Args:
        level_factors: one for each level.
        loss_factors: of text, prompt and response.
        fused_head, dense_mask: as in `masked_codes`.
    """
    text, prompt, response = loss_factors
    levels = len(level_factors)
    factors = {
        CodePart.TEXT: text,
        CodePart.PROMPT: prompt,
        CodePart.RESPONSE: response,
        CodePart.TRANSCRIPT: 1.0,
    }
    # Codes of one part and text of another have heads of their own, so the heads compute two parts at once.
    together = [(CodePart.RESPONSE, CodePart.TRANSCRIPT)]
    if text or prompt:
        together.append((CodePart.PROMPT, CodePart.TEXT))
    weights = {CodePart.RESPONSE: np.array(level_factors, np.float64), CodePart.PROMPT: np.ones(levels)}

    def loss_with(factors: Mapping[CodePart, float]) -> DecoderLoss:
        def loss_head(
            decoder: Decoder, hidden_BSH: Tensor, context: BatchContext, batch: Batch, _: None
        ) -> MicroBatchLoss:
            states_BSH = decoder.norm(hidden_BSH)
            sums, of_parts = [], dict[CodePart, list[TokenLoss]]()
            for codes, words in together:
                losses = level_losses(decoder, states_BSH, _labels(batch, codes, words), fused=fused_head)
                sums.append(_weighted(losses, [*(factors[codes] * weights[codes]), factors[words]]))
                of_parts[codes], of_parts[words] = losses[:-1], losses[-1:]
            words_losses = [loss for _, words in together for loss in of_parts[words]]
            metric_sums = {
                **_metrics_of_levels(of_parts[CodePart.RESPONSE]),
                **_mean("text_accuracy", words_losses, "correct_count"),
            }
            return MicroBatchLoss(paddle.add_n(sums), metric_sums)

        return DecoderLoss(loss_head, _units, dense_mask)

    def loss_of_step(decoder: Decoder, batches: Iterable[Batch], ranks: Ranks) -> DecoderLoss:
        counts, units = _over_step(batches, ranks, len(CodePart), _counts_of_parts)
        return loss_with({part: factor * units / max(counts[part], 1) for part, factor in factors.items()})

    return Objective(loss_with(factors), UNIT, loss_of_step=loss_of_step)


def _units(batch: Batch) -> int:
    return batch.target_count


def _targets(batch: Batch) -> CodeTargets:
    assert batch.codes_view is not None, "an objective of codes needs a batch of codes"
    return batch.codes_view


def _labels(batch: Batch, codes: CodePart, words: CodePart) -> np.ndarray:
    """Return int64[B, S, L + 1]: the labels of each level in one part, and those of text in another."""
    targets = _targets(batch)
    assert targets.part is not None, "this objective needs to know the part of each label"
    in_codes, in_words = targets.part == codes, targets.part == words
    of_codes = np.where(in_codes[..., None], targets.labels, IGNORE_INDEX)
    of_words = np.where(in_words, batch.labels, IGNORE_INDEX)
    return np.concatenate([of_codes, of_words[..., None]], axis=-1)


def _counts_of_parts(batch: Batch) -> np.ndarray:
    """Return int64[5], the labels of each `CodePart`, of codes and of text."""
    targets = _targets(batch)
    assert targets.part is not None, "this objective needs to know the part of each label"
    of_positions = np.count_nonzero(targets.labels != IGNORE_INDEX, axis=-1) + (batch.labels != IGNORE_INDEX)
    return np.bincount(targets.part.ravel(), of_positions.ravel(), minlength=len(CodePart))


def _over_step(
    batches: Iterable[Batch], ranks: Ranks, size: int, count: Callable[[Batch], np.ndarray]
) -> tuple[np.ndarray, float]:
    """Return float64[size], the sum of `count` over these batches and those of the other ranks, and their units."""
    total = np.zeros(size + 1)
    for batch in batches:
        total += [*count(batch), _units(batch)]
    *counts, units = ranks.sum(total).tolist()
    return np.array(counts), units


def _weighted(losses: Sequence[TokenLoss], factors: Iterable[float]) -> Tensor:
    """Return the sum of the losses, each times its factor, 0-d; it depends on the heads of all of them."""
    return paddle.add_n([loss.loss_sum * float(factor) for loss, factor in zip(losses, factors, strict=True)])


def _metrics_of_levels(losses: Sequence[TokenLoss]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for level, loss in enumerate(losses):
        found |= _mean(f"loss_{level}", [loss], "loss_sum") | _mean(f"accuracy_{level}", [loss], "correct_count")
    return _mean("code_accuracy", losses, "correct_count") | found


def _mean(name: str, losses: Sequence[TokenLoss], of: str) -> dict[str, Any]:
    """Return a metric that is a sum over the targets of some losses, with their number as its denominator."""
    values = [getattr(loss, of).detach().astype("float64") for loss in losses]
    counts = [loss.target_count.astype("float64") for loss in losses]
    return {name: paddle.add_n(values), name + UNITS: paddle.add_n(counts)}
