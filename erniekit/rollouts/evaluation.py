"""Evaluate a model by rewards: it answers held-out prompts, taking the likeliest tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.model.decoder import Decoder
from erniekit.rewards.rewards import Rewards
from erniekit.rollouts.advantages import weighted_rewards
from erniekit.rollouts.prompts import PromptDataset
from erniekit.rollouts.sampling import Sampled, Texts, sample_answers
from erniekit.training.callbacks.files import WarnOnIoError
from erniekit.training.collectives import Ranks
from erniekit.training.evaluation import EvaluationResult


@dataclass(frozen=True)
class RewardEvaluation:
    """Answers the same prompts at every evaluation.

    Attributes:
        longest: the most tokens of an answer.
        samples: the file to write.
        dp_rank, dp_world_size: which of the ranks with different data this is.
    """

    dataset: PromptDataset
    rewards: Rewards
    texts: Texts
    longest: int
    samples: Path
    ranks: Ranks
    dp_rank: int = 0
    dp_world_size: int = 1

    def __call__(self, model: Decoder) -> EvaluationResult:
        """Return the mean rewards, and write every answer as a JSON line."""
        started = time.perf_counter()
        data = self.dataset.prompts
        own = range(len(data))[self.dp_rank :: self.dp_world_size]
        found = sample_answers(
            model,
            [data[number].ids for number in own],
            list(own),
            longest=self.longest,
            stop_token_ids=self.texts.stop_token_ids,
        )
        answers: list[Sampled] = [Sampled([], [], True)] * len(data)
        for rank, part in self.ranks.all_gather_object([self.dp_rank, [list(answer) for answer in found]]):
            for number, answer in zip(range(len(data))[rank :: self.dp_world_size], part, strict=True):
                answers[number] = Sampled(*answer)
        scores = np.array(self.ranks.all_gather_object(self._scores(answers))[0], np.float64)
        rows = scores.reshape(len(data), len(self.rewards.names))
        seconds = time.perf_counter() - started
        sources = self.dataset.source_of
        by_source = {
            name: self._result(np.flatnonzero(sources == number), answers, rows, seconds)
            for number, name in enumerate(self.dataset.names)
            if (sources == number).any()
        }
        whole = self._result(np.arange(len(data)), answers, rows, seconds)
        return whole if len(by_source) < 2 else _with_sources(whole, by_source)

    def _scores(self, answers: Sequence[Sampled]) -> list[list[float]] | None:
        """Score answers and write them, on the first rank."""
        if not self.ranks.is_main_process:
            return None
        data = self.dataset.prompts
        texts = [self.texts.decode(answer.text_tokens) for answer in answers]
        asked = [prompt.answered(text) for prompt, text in zip(data, texts, strict=True)]
        scores: list[list[float]] = self.rewards.score(asked).tolist()
        with WarnOnIoError(str(self.samples)).warned(), open(self.samples, "w", encoding="utf-8") as file:
            for prompt, text, answer, own in zip(data, texts, answers, scores, strict=True):
                line: dict[str, Any] = {"place": prompt.where, "messages": prompt.messages, "answer": text}
                line |= {"cut": True} if answer.cut else {}
                line["rewards"] = dict(zip(self.rewards.names, own, strict=True))
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        return scores

    def _result(
        self, chosen: np.ndarray, answers: Sequence[Sampled], scores: np.ndarray, seconds: float
    ) -> EvaluationResult:
        """Return the means over some of the answers."""
        own = [answers[number] for number in chosen]
        tokens = sum(len(answer.tokens) for answer in own)
        metrics = {"reward": float(weighted_rewards(scores[chosen], self.rewards.weights).mean())}
        metrics |= {
            f"reward_{name}": float(value)
            for name, value in zip(self.rewards.names, scores[chosen].mean(axis=0), strict=True)
        }
        metrics |= {"completion_len": tokens / len(own), "completions_cut": float(np.mean([each.cut for each in own]))}
        return EvaluationResult(
            loss=None,
            perplexity=None,
            metrics=metrics,
            units=len(own),
            tokens=tokens,
            batches=len(own),
            batches_available=len(own),
            seconds=seconds,
        )


def _with_sources(whole: EvaluationResult, sources: dict[str, EvaluationResult]) -> EvaluationResult:
    return EvaluationResult(**{**vars(whole), "sources": sources})
