"""What is scored, and the error of a reward that cannot score it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.errors import UserError

_SHOWN = 60  # characters of an answer in an error


class RewardError(UserError):
    """A reward cannot be computed, or what was given for it is no finite number."""


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


def sample(answer: Answer) -> str:
    """Return how errors name an answer: how it begins, and the place of its record."""
    text = answer.text if len(answer.text) <= _SHOWN else answer.text[: _SHOWN - 3] + "..."
    return f"the answer {text!r} to {answer.where}"
