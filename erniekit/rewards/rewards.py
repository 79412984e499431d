"""Score answers by the rewards that a configuration declares.

A reward scores many answers at once and gives one number for each. Whatever goes wrong in one of them, a user's mistake
or a function that never returns, ends in a `RewardError` that names the reward, the sample and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from erniekit.config import Config
from erniekit.config.sections.rewards import DeclaredReward, RewardParameters, read_range, read_reward, read_tolerance
from erniekit.rewards import rules
from erniekit.rewards.answer import Answer, RewardError, sample
from erniekit.rewards.functions import ProcessReward
from erniekit.rewards.process import Limits
from erniekit.rewards.references import reference_of

__all__ = ["Answer", "Reward", "RewardError", "Rewards", "open_rewards"]


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


def open_rewards(config: Config, *, scores: bool = True) -> Rewards:
    """Return the rewards that a configuration declares, with the processes of those that have one.

    Args:
        scores: whether this process scores answers. Of several ranks the first one does; the others know the names and
            weights, and hold neither processes nor models.

    Raises:
        RewardError: one cannot be opened, for example because its file is missing.
    """
    section = config.rewards
    rewards: dict[str, Reward] = {}
    if not scores:
        names = [read_reward(text).name for text in section.rewards]
        return Rewards(dict.fromkeys(names, _Elsewhere()), section.reward_weights or [1.0] * len(names))
    with ExitStack() as opened:  # where one fails, or Ctrl-C comes, the processes of those before end
        for text in section.rewards:
            declared = read_reward(text)
            rewards[declared.name] = reward = _opened(declared, section)
            opened.callback(reward.close)
        opened.pop_all()
    return Rewards(rewards, section.reward_weights or [1.0] * len(rewards))


def _opened(declared: DeclaredReward, section: RewardParameters) -> Reward:
    if declared.kind in _PROGRAMS:
        program = {declared.kind: _PROGRAMS[declared.kind](declared.argument)}
        limits = Limits(section.reward_time_limit, int(section.reward_memory_limit * 2**30))
        return ProcessReward(declared.name, program, limits, section.reference_field)
    if declared.kind == "reward_model":
        from erniekit.rewards.models import ModelReward  # needs Paddle, which the others do without

        return ModelReward(declared.name, Path(declared.argument).expanduser())
    return _RuleReward(declared.name, _RULES[declared.kind](declared, section.reference_field))


class _Elsewhere:
    """A reward that another rank computes."""

    def score(self, answers: Sequence[Answer]) -> Sequence[float]:
        raise AssertionError("the first rank scores answers")

    def close(self) -> None:
        """Nothing is held."""


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


def _length(declared: DeclaredReward, field: str) -> Callable[[Answer], float]:
    fewest, most = read_range(declared.argument)
    return lambda answer: rules.length(answer.text, fewest, most)


_RULES: Mapping[str, Callable[[DeclaredReward, str], Callable[[Answer], float]]] = {
    "exact_match": _exact_match,
    "numeric": _numeric,
    "length": _length,
}
# What a process gets to know of a reward's argument. Patterns and schemas may take for ever on an unlucky answer.
_PROGRAMS: Mapping[str, Callable[[str], str]] = {
    "regex": lambda pattern: pattern,
    "json_schema": lambda path: str(Path(path).expanduser().resolve()),
    "python": lambda function: function,
}
