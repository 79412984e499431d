"""Score answers by the rewards that a configuration declares.

A reward scores many answers at once and gives one number for each. Whatever goes wrong in one of them, a user's mistake
or a function that never returns, ends in a `RewardError` that names the reward, the sample and what to do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from erniekit.config import Config
from erniekit.config.sections.rewards import DeclaredReward, read_range, read_reward, read_tolerance
from erniekit.errors import UserError
from erniekit.rewards import rules
from erniekit.rewards.references import reference_of


class RewardError(UserError):
    """A reward cannot be computed, or a number that is none was given for it."""


@dataclass(frozen=True)
class Answer:
    """An answer to be scored.

    Attributes:
        messages: the prompt, as messages with `role` and `content`.
        text: the answer.
        record: the data record that the prompt comes from, with all its fields.
        where: the place of the record in the data, such as "data.jsonl:12".
    """

    messages: list[dict[str, Any]]
    text: str
    record: Mapping[str, Any]
    where: str


class Reward(Protocol):
    """What computes one reward."""

    def score(self, answers: Sequence[Answer]) -> Sequence[float]:
        """Return a number for each answer. Raises RewardError."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class Rewards:
    """The rewards of a configuration, in its order.

    Attributes:
        names: of the rewards.
        weights: of the rewards in their sum, float64 [names].
    """

    def __init__(self, rewards: Mapping[str, Reward], weights: Sequence[float]) -> None:
        self.names = tuple(rewards)
        self.weights = np.asarray(weights, np.float64)
        self._rewards = tuple(rewards.values())

    def score(self, answers: Sequence[Answer]) -> np.ndarray:
        """Return the reward of each answer under each name, without the weights: float64 [answers, names].

        Raises:
            RewardError: a reward cannot be computed; the text names it, the sample, and what to do.
        """
        scores = np.zeros((len(answers), len(self.names)), np.float64)
        for column, (name, reward) in enumerate(zip(self.names, self._rewards, strict=True)):
            values = reward.score(answers) if answers else []
            for row, (answer, value) in enumerate(zip(answers, values, strict=True)):
                if not math.isfinite(value):
                    raise RewardError(f"reward {name}: it is {value} for {sample(answer)}; a reward is a finite number")
                scores[row, column] = value
        return scores

    def close(self) -> None:
        """End the processes of the rewards."""
        for reward in self._rewards:
            reward.close()


def sample(answer: Answer) -> str:
    """Return how errors name an answer: the place of its record and how it begins."""
    text = answer.text if len(answer.text) <= 60 else answer.text[:57] + "..."
    return f"the answer {text!r} to {answer.where}"


def open_rewards(config: Config) -> Rewards:
    """Return the rewards that a configuration declares.

    Raises:
        RewardError: one cannot be opened, for example because its file is missing.
    """
    section = config.rewards
    rewards: dict[str, Reward] = {}
    for text in section.rewards:
        declared = read_reward(text)
        rewards[declared.name] = _RuleReward(declared.name, _RULES[declared.kind](declared, section.reference_field))
    return Rewards(rewards, section.reward_weights or [1.0] * len(rewards))


class _RuleReward:
    """A reward by a rule over one answer, which raises ValueError where the record does not fit it."""

    def __init__(self, name: str, rule: Callable[[Answer], float]) -> None:
        self._name, self._rule = name, rule

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [self._one(answer) for answer in answers]

    def _one(self, answer: Answer) -> float:
        try:
            return self._rule(answer)
        except ValueError as error:
            raise RewardError(
                f"reward {self._name}: {answer.where}: {error}\n  Name the field of the records that has the reference "
                "answer: reference_field: NAME"
            ) from None

    def close(self) -> None:
        """Nothing is held."""


def _exact_match(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    return lambda answer: rules.exact_match(answer.text, reference_of(answer.record, field))


def _numeric(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    tolerance = read_tolerance(declared.argument)
    return lambda answer: rules.numeric(answer.text, reference_of(answer.record, field), tolerance)


def _regex(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    pattern = re.compile(declared.argument)
    return lambda answer: rules.regex(answer.text, pattern)


def _length(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    fewest, most = read_range(declared.argument)
    return lambda answer: rules.length(answer.text, fewest, most)


def _json_schema(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    path = Path(declared.argument).expanduser()
    try:
        validator = rules.schema_validator(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RewardError(f"reward {declared.name}: {path}: is no JSON schema that can be read: {error}") from None
    return lambda answer: rules.json_schema(answer.text, validator)


_RULES: Mapping[str, Callable[[DeclaredReward, str], Callable[[Answer], float]]] = {
    "exact_match": _exact_match,
    "numeric": _numeric,
    "regex": _regex,
    "length": _length,
    "json_schema": _json_schema,
}
