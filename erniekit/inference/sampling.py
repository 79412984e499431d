"""Sample the next token from logits. NumPy only, so that a seed gives the same text on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, and when to stop.

    They apply in this order: repetition penalty, temperature, top-k, min-p, top-p.
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


def random_stream(sampling: Sampling, number: int) -> np.random.Generator:
    """Return the random generator of one answer; answers with different numbers draw independently."""
    return np.random.default_rng([sampling.seed, number])


def sample_token(logits_V: np.ndarray, seen: Sequence[int], sampling: Sampling, generator: np.random.Generator) -> int:
    """Return the next token id for one row of logits [V], given the tokens of its prompt and answer so far."""
    if sampling.temperature == 0.0 and sampling.repetition_penalty == 1.0:
        return int(logits_V.argmax())
    logits = penalise(logits_V, seen, sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    probabilities = token_probabilities(logits, sampling)
    return int(generator.choice(len(probabilities), p=probabilities))


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
