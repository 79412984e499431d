"""A rollout: the answers that were sampled at once, what they are worth, and the batches that learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample

_DTYPES = {
    "prompts": np.int64, "prompt_lengths": np.int64, "lengths": np.int64, "tokens": np.int64,
    "sampled_logps": np.float32, "cut": np.bool_, "masked": np.bool_, "advantages": np.float32,
    "figures": np.float32, "old_logps": np.float32, "reference_logps": np.float32,
}  # fmt: skip


class Sizes(NamedTuple):
    """How many answers a run samples at once, and what they serve.

    Attributes:
        per_update: the answers of one optimizer step, over all ranks.
        updates: among how many steps those of a rollout are divided.
        passes: how often they are learned from.
        group: the answers to one prompt.
    """

    per_update: int
    updates: int
    passes: int
    group: int

    @property
    def answers(self) -> int:
        """Of a rollout."""
        return self.per_update * self.updates

    @property
    def prompts(self) -> int:
        """Of a rollout."""
        return self.answers // self.group

    @property
    def steps(self) -> int:
        """Optimizer steps that a rollout serves."""
        return self.updates * self.passes


def figure_names(rewards: Sequence[str], *, dynamic: bool) -> tuple[str, ...]:
    """Return the names of what the log shows of answers: the columns of `Rollout.figures`."""
    own = tuple(f"reward_{name}" for name in rewards)
    names = ("reward", *own, "reward_std", "completion_len", "completions_cut", "groups_equal")
    return (*names, "groups_dropped") if dynamic else names


@dataclass(frozen=True, eq=False)
class Rollout:
    """A answers with T tokens in all; the same on every rank.

    Attributes:
        prompts: int64 [A], indices of the data set; those of a group stand together.
        prompt_lengths, lengths: int64 [A], tokens of the prompt, and of the answer with its end.
        tokens: int64, of each answer its prompt and the answer, one after another.
        sampled_logps: fp32 [T], log-probabilities where the tokens were sampled.
        cut: bool [A], whether an answer has no end.
        masked: bool [A], whether nothing is learned from it.
        advantages: fp32 [T].
        figures: fp32 [A, F], what the log shows of each answer.
        old_logps: fp32 [T], log-probabilities before the first update; [0] where they serve one update only.
        reference_logps: fp32 [T]; [0] without a reference.
    """

    prompts: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    sampled_logps: np.ndarray
    cut: np.ndarray
    masked: np.ndarray
    advantages: np.ndarray
    figures: np.ndarray
    old_logps: np.ndarray
    reference_logps: np.ndarray

    @classmethod
    def of(
        cls,
        prompts: Sequence[int],
        prompt_ids: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        logps: Sequence[Sequence[float]],
        cut: Sequence[bool],
    ) -> Rollout:
        """Return the rollout of some answers, which nothing is known of yet."""
        joined = [token for pair in zip(prompt_ids, answers, strict=True) for part in pair for token in part]
        values: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()} | {
            "prompts": prompts,
            "prompt_lengths": [len(ids) for ids in prompt_ids],
            "lengths": [len(answer) for answer in answers],
            "tokens": joined,
            "sampled_logps": [value for own in logps for value in own],
            "cut": cut,
            "masked": np.zeros(len(answers), bool),
            "figures": np.zeros((len(answers), 0)),
        }
        return cls(**{name: np.asarray(value, _DTYPES[name]) for name, value in values.items()})

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """int64 [A + 1], where the tokens of each answer begin among all T."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def with_values(self, **values: Any) -> Rollout:
        """Return the rollout with some of its arrays."""
        return replace(self, **{name: np.asarray(value, _DTYPES[name]) for name, value in values.items()})

    def batch(self, answers: Sequence[int], pad_id: int, row_length: int = 0, *, share_prompts: bool = False) -> Batch:
        """Return the micro-batch of some answers, laid end to end in their order.

        Args:
            row_length: the most tokens of a row with several answers.
            share_prompts: neighbours that answer the same prompt have it once in a row; all but its last token, which
                predicts another token in each of them.
        """
        rows: list[list[Sample]] = []
        indices: list[list[int]] = []
        room = 0
        for number, sample in enumerate(self._samples(answers)):
            prompt, size = int(self.prompts[answers[number]]), len(sample.input_ids)
            shares = share_prompts and room > 0 and indices[-1][-1] == prompt
            shared = int(self.prompt_lengths[answers[number]]) - 1 if shares else 0
            if size - shared > room:
                rows.append([])
                indices.append([])
                room, shared = max(row_length, size), 0
            if shared:
                rows[-1][-1] = _with_answer(rows[-1][-1], sample, shared)
            else:
                rows[-1].append(sample)
            indices[-1].append(prompt)
            room -= size - shared
        batch = collate(rows, indices, pad_id, arrays=("answer_of", *self._per_token))
        return batch.with_arrays(answer_figures=self.figures[list(answers)])

    @property
    def _per_token(self) -> list[str]:
        """The names of the arrays [T] that a batch has."""
        logps = [name for name in ("old_logps", "reference_logps") if len(getattr(self, name))]
        return ["advantages", "sampled_logps", *logps]

    def _samples(self, answers: Sequence[int]) -> Iterator[Sample]:
        """Yield some answers, each behind its prompt."""
        begins = np.concatenate([[0], np.cumsum(self.prompt_lengths + self.lengths)])
        starts = self.starts
        for number, answer in enumerate(answers):
            ids = self.tokens[begins[answer] : begins[answer + 1]]
            first = int(self.prompt_lengths[answer]) - 1  # the position that predicts the first token of the answer
            labels = np.full(len(ids) - 1, IGNORE_INDEX, np.int32)
            if not self.masked[answer]:
                labels[first:] = ids[first + 1 :]
            arrays: dict[str, np.ndarray] = {"answer_of": np.where(labels != IGNORE_INDEX, number, -1).astype(np.int32)}
            for name in self._per_token:
                values: np.ndarray = np.zeros(len(labels), np.float32)
                if len(own := getattr(self, name)):
                    values[first:] = own[starts[answer] : starts[answer + 1]]
                arrays[name] = values
            yield Sample(ids[:-1].astype(np.int32), labels, arrays=arrays)

    def scattered(self, answers: Sequence[int], values: np.ndarray, into: np.ndarray) -> None:
        """Put the values of the tokens of some answers, in their order, where they belong in an array of all T."""
        starts, place = self.starts, 0
        for answer in answers:
            if self.masked[answer]:
                continue
            length = int(self.lengths[answer])
            into[starts[answer] : starts[answer + 1]] = values[place : place + length]
            place += length

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Return its arrays by name, as a checkpoint holds them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def _with_answer(sample: Sample, other: Sample, shared: int) -> Sample:
    """Return the answers of a sample and that of another one, behind the `shared` tokens with which both begin."""
    rest = other.arrays
    return replace(
        sample,
        input_ids=np.concatenate([sample.input_ids, other.input_ids[shared:]]),
        labels=np.concatenate([sample.labels, other.labels[shared:]]),
        arrays={name: np.concatenate([values, rest[name][shared:]]) for name, values in sample.arrays.items()},
        answers=(*(sample.answers or (shared,)), len(sample.input_ids)),
    )


def answers_of_update(count: int, updates: int, update: int, rollout: int, seed: int) -> np.ndarray:
    """Return which answers of a rollout an update learns from: int64 [count / updates].

    Args:
        count: the answers of the rollout.
        updates: among how many updates they are divided in one pass.
        update: counts from 0 over all passes; every pass has an order of its own, unless it is one update.
        rollout: the number of the rollout.
    """
    size = count // updates
    number, part = divmod(update, updates)
    if updates == 1:
        return np.arange(count)
    order = np.random.default_rng([seed, rollout, number]).permutation(count)
    return order[part * size : (part + 1) * size]
