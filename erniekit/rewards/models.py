"""A reward model as a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from erniekit.data.conversation import Conversation
from erniekit.data.formats.problems import MalformedError
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.errors import UserError
from erniekit.inference.reward_model import open_reward_model
from erniekit.rewards.answer import Answer, RewardError


class ModelReward:
    """The scores of a reward model, which lies in the memory of this process beside the model that is trained.

    Args:
        name: of the reward.
        folder: of a model of stage RM, or of one that transformers has saved for sequence classification with a label.

    Raises:
        RewardError: the folder holds no reward model.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        try:
            self._model = open_reward_model(folder)
        except UserError as error:
            raise RewardError(f"reward {name}: {error}") from None

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Return the score of each answer as the last turn of its dialogue. Raises RewardError."""
        try:
            dialogues = [_dialogue(answer) for answer in answers]
            scores = self._model.score(dialogues, [answer.where for answer in answers])
        except UserError as error:
            raise RewardError(f"reward {self._name}: {error}") from None
        return [float(score) for score in scores]

    def close(self) -> None:
        """Nothing is held but memory."""


def _dialogue(answer: Answer) -> Conversation:
    """Return the dialogue that ends with an answer, which may be any text, also none."""
    messages = [*answer.messages, {"role": "assistant", "content": "-"}]
    try:
        parsed = parse_record(FORMATS["messages"], {"messages": messages})
    except MalformedError as error:
        raise UserError(f"{answer.where}: {error}") from None
    assert isinstance(parsed, Conversation)
    return replace(parsed, turns=(*parsed.turns[:-1], replace(parsed.turns[-1], content=answer.text)))
