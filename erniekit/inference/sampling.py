"""Sample the next token from logits, in float64 on the CPU, so that a seed gives the same text on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from erniekit.native import library

_AT_ONCE = 1 << 20  # logits that become float64 together


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, and when to stop.

    They apply in this order: repetition penalty, the other penalties and biases, temperature, top-k, min-p, top-p.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: always the most likely token
    top_p: float = 1.0  # keep the smallest set of most likely tokens with at least this much probability
    top_k: int = 0  # keep this many of the most likely tokens; 0: all
    repetition_penalty: float = 1.0  # Keskar et al., 2019, arXiv:1909.05858, over prompt and answer
    stop_token_ids: Sequence[int] = ()
    seed: int = 0
    max_length: int | None = None  # of prompt and answer together, in tokens; None: the model's own limit
    min_p: float = 0.0  # keep tokens with at least this share of the largest probability; 0: all
    presence_penalty: float = 0.0  # taken from the logit of each token of the answer
    frequency_penalty: float = 0.0  # the same, once for each time that it stands there
    logit_bias: Sequence[tuple[int, float]] = ()  # a token, and what is added to its logit
    logprobs: int | None = None  # tell the probabilities of each token and of so many of the likeliest; None: none
    tempered_logprobs: bool = False  # tell those after the temperature, which is above 0

    @property
    def keeps_the_likeliest(self) -> bool:
        """Whether the token with the largest logit is always taken."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias
        return self.temperature == 0.0 and self.repetition_penalty == 1.0 and not changed

    @property
    def draws_by_temperature(self) -> bool:
        """Whether the temperature alone changes the probabilities by which tokens are drawn."""
        changed = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.repetition_penalty != 1.0
        some = self.top_k or self.top_p < 1.0 or self.min_p > 0.0
        return self.temperature > 0.0 and not changed and not some


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities before penalties and temperature: of the token that was taken, and of the
    likeliest ones, the largest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def random_stream(sampling: Sampling, number: int) -> np.random.Generator:
    """Return the random generator of one answer; answers with different numbers draw independently."""
    return np.random.default_rng([sampling.seed, number])


def sample_token(
    logits_V: np.ndarray, seen: Sequence[int], sampling: Sampling, generator: np.random.Generator, answered: int = 0
) -> int:
    """Return the next token id for one row of logits [V], given the tokens of its prompt and answer so far.

    Args:
        answered: how many of `seen`, at its end, are of the answer.
    """
    if sampling.keeps_the_likeliest:
        return int(logits_V.argmax())
    logits = penalise(logits_V, seen, sampling.repetition_penalty)
    _shift(logits, seen[len(seen) - answered :], sampling)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    sums = np.cumsum(token_probabilities(logits, sampling))
    return int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))


def draw_by_temperature(
    logits_RV: np.ndarray, samplings: Sequence[Sampling], generators: Sequence[np.random.Generator]
) -> list[tuple[int, TokenLogprobs | None]]:
    """Draw the next tokens of rows of float32 logits [R, V] at once, with the logarithms of probabilities they want.

    Each row gives what `sample_token` and `token_logprobs` give of it alone. `draws_by_temperature` must hold for all
    settings. Rows with logits that are not finite give a token that means nothing.
    """
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    step = max(1, _AT_ONCE // logits_RV.shape[1])
    for start in range(0, len(logits_RV), step):
        rows = slice(start, start + step)
        drawn += _draw_some(logits_RV[rows], samplings[rows], generators[rows])
    return drawn


def _draw_some(
    logits_RV: np.ndarray, samplings: Sequence[Sampling], generators: Sequence[np.random.Generator]
) -> list[tuple[int, TokenLogprobs | None]]:
    temperatures_R1 = np.array([[sampling.temperature] for sampling in samplings])
    shares_R = np.array([generator.random() for generator in generators])
    tempered_R1 = np.array([[s.temperature if s.tempered_logprobs else 1.0] for s in samplings], np.float32)
    kernel = library.function_if_open("draw_tokens", "llpppppp")
    if kernel is not None and not any(sampling.logprobs for sampling in samplings):
        return _drawn_by_kernel(kernel, logits_RV, temperatures_R1, tempered_R1, shares_R, samplings)
    with np.errstate(all="ignore"):  # what is not finite is told by the caller
        weights_RV = _weights(logits_RV, temperatures_R1)
        tokens = _places(weights_RV, shares_R).tolist()
        shown_RV = logits_RV if (tempered_R1 == 1.0).all() else logits_RV / tempered_R1
        chosen: list[float] = []
        if any(sampling.logprobs == 0 for sampling in samplings):
            if (temperatures_R1 != 1.0).any():
                weights_RV = _weights(shown_RV)
            taken_R = shown_RV[np.arange(len(tokens)), tokens].astype(np.float64) - shown_RV.max(axis=1)
            chosen = (taken_R - np.log(weights_RV.sum(axis=1))).tolist()
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    for row, (sampling, token) in enumerate(zip(samplings, tokens, strict=True)):
        if not sampling.logprobs:
            drawn.append((token, None if sampling.logprobs is None else TokenLogprobs(chosen[row], ())))
        else:
            drawn.append((token, token_logprobs(shown_RV[row], token, sampling.logprobs)))
    return drawn


def _drawn_by_kernel(
    kernel: Callable[..., None],
    logits_RV: np.ndarray,
    temperatures_R1: np.ndarray,
    divisors_R1: np.ndarray,
    shares_R: np.ndarray,
    samplings: Sequence[Sampling],
) -> list[tuple[int, TokenLogprobs | None]]:
    """Return what `_draw_some` does where no other tokens are told, by one call of C (`native/source/drawing.c`)."""
    (rows, columns), logits_RV = logits_RV.shape, np.ascontiguousarray(logits_RV)
    tokens_R, logps_R = np.empty(rows, np.int64), np.empty(rows)
    arrays = logits_RV, temperatures_R1, divisors_R1, shares_R, tokens_R, logps_R
    kernel(rows, columns, *(array.ctypes.data for array in arrays))
    return [
        (token, None if sampling.logprobs is None else TokenLogprobs(logp, ()))
        for sampling, token, logp in zip(samplings, tokens_R.tolist(), logps_R.tolist(), strict=True)
    ]


def _places(weights_RV: np.ndarray, shares_R: np.ndarray) -> np.ndarray:
    """Return the first column of each row that, with those before it, has more than a share of the row's weights.

    Sums of some columns are searched first: a running sum waits for every addition.
    """
    rows, columns = weights_RV.shape
    width = 1 << columns.bit_length() // 2
    if columns % width:
        weights_RV = np.pad(weights_RV, ((0, 0), (0, -columns % width)))
    parts_RPW = weights_RV.reshape(rows, -1, width)
    each = np.arange(rows)
    sums_RP = parts_RPW.sum(axis=2).cumsum(axis=1)
    places_R = shares_R * sums_RP[:, -1]
    parts_R = (sums_RP[:, :-1] <= places_R[:, None]).sum(axis=1)
    behind_R = places_R - np.where(parts_R > 0, sums_RP[each, parts_R - 1], 0.0)
    sums_RW = parts_RPW[each, parts_R].cumsum(axis=1)
    return np.minimum(parts_R * width + (sums_RW[:, :-1] <= behind_R[:, None]).sum(axis=1), columns - 1)


def _weights(logits_RV: np.ndarray, temperatures_R1: np.ndarray | float = 1.0) -> np.ndarray:
    """Return exp(logits / temperature), float64, where the largest logit of each row is taken from all of them.

    In place: where several arrays of this size come and go, the system takes their memory back each time.
    """
    weights_RV = np.subtract(logits_RV, logits_RV.max(axis=1, keepdims=True), dtype=np.float64)
    if np.any(temperatures_R1 != 1.0):
        weights_RV /= temperatures_R1
    return np.exp(weights_RV, out=weights_RV)


def _shift(logits_V: np.ndarray, answer: Sequence[int], sampling: Sampling) -> None:
    """Apply the penalties of what the answer has already, and biases, to float64 logits in place."""
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(answer):
        ids, counts = np.unique(np.asarray(answer), return_counts=True)
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias


def token_logprobs(logits_V: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Return the logarithm of a token's probability, and those of the `count` likeliest tokens, for one row [V]."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    first = np.argpartition(-logprobs, min(count, len(logprobs) - 1))[:count] if count else np.zeros(0, np.int64)
    order = sorted((int(each) for each in first), key=lambda each: (-logprobs[each], each))
    return TokenLogprobs(float(logprobs[token]), tuple((each, float(logprobs[each])) for each in order))


def penalise(logits_V: np.ndarray, seen: Sequence[int], penalty: float) -> np.ndarray:
    """Return float64 logits [V] in which a penalty above 1 makes each token of `seen` less likely, once."""
    logits = logits_V.astype(np.float64)
    if penalty != 1.0 and len(seen):
        ids = np.unique(np.asarray(seen))
        logits[ids] = np.where(logits[ids] > 0, logits[ids] / penalty, logits[ids] * penalty)
    return logits


def token_probabilities(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return probabilities after temperature, top-k, min-p and top-p; float64 [V], summing to 1."""
    likely_first = np.argsort(-logits_V, kind="stable")
    scaled = (logits_V[likely_first] - logits_V[likely_first[0]]) / sampling.temperature
    if sampling.top_k:
        scaled[sampling.top_k :] = -np.inf
    if sampling.min_p > 0.0:
        scaled[scaled < np.log(sampling.min_p)] = -np.inf
    sorted_probabilities = np.exp(scaled)
    sorted_probabilities /= sorted_probabilities.sum()
    if sampling.top_p < 1.0:
        # A token stays if those before it do not reach top_p yet, so the first one always stays.
        before = np.cumsum(sorted_probabilities) - sorted_probabilities
        sorted_probabilities[before >= sampling.top_p] = 0.0
    probabilities = np.empty_like(sorted_probabilities)
    probabilities[likely_first] = sorted_probabilities / sorted_probabilities.sum()
    return probabilities
