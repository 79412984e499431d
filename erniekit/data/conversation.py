"""The parsed form of a record, whatever format it was written in, and the sources that records come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.units import Units
from erniekit.errors import DataError

if TYPE_CHECKING:
    from erniekit.data.split import Split

USER, ASSISTANT = "user", "assistant"
TOOL_ROLES = ("tool", "function")  # results of calls


class Part(NamedTuple):
    """A part of a content with units of speech, or of an answer of which some parts are not trained.

    Attributes:
        value: None stands for the next of the turn's clips.
        trained: whether its tokens are targets where the turn is trained.
    """

    value: str | Units | None
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance. `trained` marks an assistant turn whose tokens are targets; it is False for users.

    Attributes:
        fields: what the template sees in addition to the role, for a turn that calls tools or holds a tool's result.
        thoughts: what the assistant thinks before it answers, for templates that take `reasoning_content`.
        clips: the recordings in the content, in their order; the content itself has no mark of them.
        units_and_texts: the parts of a content with units, or with parts that are not trained; () for all others.
            `content` has the texts alone.
    """

    role: str
    content: str
    trained: bool = False
    fields: Mapping[str, Any] | None = None
    thoughts: str = ""
    clips: tuple[ContentClip, ...] = ()
    units_and_texts: tuple[Part, ...] = ()

    def written(self, unit_token: str = "<|unit{}|>", between: str = "") -> str:
        """Return the content with units as their tokens, for people to read.

        Args:
            between: stands between two parts.
        """
        if not self.units_and_texts:
            return self.content
        parts = [part.value for part in self.units_and_texts if part.value is not None]
        return between.join(
            part if isinstance(part, str) else "".join(unit_token.replace("{}", str(code)) for code in part.codes)
            for part in parts
        )

    @property
    def parts(self) -> list[str | Clip]:
        """The content with the recordings in their places, without units; no text is empty."""
        parts: list[str | Clip] = []
        start = 0
        for offset, clip in self.clips:
            parts += [self.content[start:offset], clip]
            start = offset
        return [part for part in (*parts, self.content[start:]) if part]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of user and assistant, and the system text ("" if there is none). It begins with the user.

    A user may have several turns before the assistant's; no other role has two turns one after the other, except tools.
    An assistant turn that calls tools is followed by their results, and those by another assistant turn.

    Attributes:
        tools: the tools that the assistant may call, in the form that the template sees.
        transcribes: whether the one answer is the transcript of the one clip, which families have a request of their
            own for.
        language: of that transcript, such as "en"; "" leaves it to the model to detect it.
    """

    turns: tuple[Turn, ...]
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    transcribes: bool = False
    language: str = ""

    @property
    def rounds(self) -> int:
        """The number of user questions, each counted with everything up to the next question."""
        return sum(turn.role == USER for turn in self.turns)

    @property
    def clips(self) -> tuple[Clip, ...]:
        """The recordings of all turns, in their order."""
        return tuple(found.clip for turn in self.turns for found in turn.clips)

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) or any(turn.fields is not None for turn in self.turns)

    def untrained(self) -> Conversation:
        """Return the conversation with turns that are only read."""
        return replace(self, turns=tuple(replace(turn, trained=False) for turn in self.turns))

    def split_answers(self) -> list[Conversation]:
        """Return a conversation for each trained answer, which ends with it and in which only it is trained."""
        history = self.untrained().turns
        return [
            replace(self, turns=(*history[:number], turn)) for number, turn in enumerate(self.turns) if turn.trained
        ]

    def drop_oldest_rounds(self, rounds: int) -> Conversation:
        """Return the conversation without its first `rounds` questions and everything that follows each."""
        starts = [number for number, turn in enumerate(self.turns) if turn.role == USER]
        start = starts[rounds] if rounds < len(starts) else len(self.turns)
        return replace(self, turns=self.turns[start:])


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt that ends with a user turn, and two continuations of it.

    Attributes:
        chosen, rejected: turns that begin and end with the assistant's.
        score_difference: score of the chosen answer minus that of the rejected one; None if the record has no scores.
        others: the further pairs of a ranking of more than two answers, of which this is the first.
    """

    prompt: Conversation
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    score_difference: float | None = None
    others: tuple[Preference, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document for stage PT; every token of it is a target."""

    text: str


# The files to read, their formats, and their proportions.


@dataclass(frozen=True, slots=True)
class Source:
    """One data file of the mixture.

    Attributes:
        kind: one of formats.registry.KINDS.
        probability: relative to the other sources; 0 leaves the source out.
        type_parameter: the parameter that names the format, for messages.
        media_dir: the folders below which its recordings lie; () for the folder of the file.
        split: the part of its records that is read; None: all of them.
    """

    path: Path
    kind: str
    probability: float = 1.0
    type_parameter: str = "train_dataset_type"
    media_dir: tuple[str, ...] = ()
    split: Split | None = None


def check_probabilities(values: Sequence[str | float]) -> list[float]:
    """Convert probabilities to numbers and check them.

    Raises:
        DataError: text, NaN, infinity, a negative value, nothing but zeros, or a sum beyond float64.
    """
    numbers = []
    for value in values:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise DataError(f"data probabilities {_join(values)}: expected numbers from 0 upwards, got {value}")
        numbers.append(number)
    if not any(numbers):
        raise DataError(f"data probabilities {_join(values)}: expected at least one above 0; nothing would be read")
    if not math.isfinite(sum(numbers)):
        raise DataError(f"data probabilities {_join(values)}: expected numbers whose sum is finite, got infinity")
    return numbers


def _join(values: Sequence[str | float]) -> str:
    return ", ".join(str(value) for value in values)
