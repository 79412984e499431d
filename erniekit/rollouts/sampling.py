"""Sample answers from the weights as they are now, with the engine of `erniekit generate`, which shares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from erniekit.config import Config
from erniekit.errors import TrainingError
from erniekit.inference.decoding.open_scheduler import open_scheduler
from erniekit.inference.decoding.scheduler import MAX_RUNNING, Event, Request
from erniekit.inference.sampling import Sampling
from erniekit.model.bf16 import weights_stay
from erniekit.model.decoder import Decoder
from erniekit.training.objectives.reference import eval_mode


class Sampled(NamedTuple):
    """An answer.

    Attributes:
        tokens: its ids, with the one that ended it.
        logps: the natural logarithm of each one's probability where it was sampled, after the temperature; empty where
            the likeliest tokens were taken.
        cut: whether it has no end.
    """

    tokens: list[int]
    logps: list[float]
    cut: bool

    @property
    def text_tokens(self) -> list[int]:
        """Those of its text: all but the one that ended it."""
        return self.tokens if self.cut else self.tokens[:-1]


class Texts(NamedTuple):
    """What makes text of tokens.

    Attributes:
        decode: the text of an answer.
        stop_token_ids: which end an answer.
        pad_id: fills up rows.
    """

    decode: Callable[[Sequence[int]], str]
    stop_token_ids: Sequence[int]
    pad_id: int


def sampling_settings(config: Config, texts: Texts) -> dict[str, Any]:
    """Return how the answers of a run are sampled, as arguments of `sample_answers`."""
    section = config.grpo
    return {
        "longest": section.max_completion_len,
        "stop_token_ids": tuple(texts.stop_token_ids),
        "temperature": section.rollout_temperature,
        "seed": config.training.seed,
    }


def sample_answers(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    streams: Sequence[int],
    *,
    longest: int,
    stop_token_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Sampled]:
    """Return an answer to each prompt.

    Args:
        streams: the number of each answer's stream of random draws.
        longest: the most tokens of an answer, with the one that ends it.
        temperature: 0 takes the likeliest token.

    Raises:
        TrainingError: logits are not finite.
    """
    if not prompts:
        return []
    sampling = Sampling(
        temperature=temperature,
        stop_token_ids=tuple(stop_token_ids),
        seed=seed,
        logprobs=0 if temperature else None,
        tempered_logprobs=temperature > 0,
    )
    most = decoder.config.max_position_embeddings
    tokens: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    cut = np.zeros(len(prompts), bool)
    scales: Any = decoder.activation_scales
    with eval_mode(decoder), weights_stay(), nullcontext() if scales is None else scales.cache_weight_codes():
        scheduler = open_scheduler(decoder, max_running=min(MAX_RUNNING, len(prompts)))
        for prompt, stream in zip(prompts, streams, strict=True):
            scheduler.submit(Request(prompt, sampling, min(longest, most - len(prompt)), stream))
        while scheduler.unfinished:
            for event in scheduler.step():
                _take(event, tokens[event.request], logps[event.request])
                cut[event.request] |= event.finished == "length"
    return [Sampled(*each) for each in zip(tokens, logps, cut.tolist(), strict=True)]


def _take(event: Event, tokens: list[int], logps: list[float]) -> None:
    if event.finished == "failed":
        raise TrainingError(
            "the model cannot answer: its logits are not finite; take an earlier checkpoint and a lower learning_rate"
        )
    token, logprobs = (event.token, event.logprobs) if event.ending is None else event.ending
    if token is not None:
        tokens.append(token)
        if logprobs is not None:
            logps.append(logprobs.chosen)
