"""What a record becomes once it is read, whatever format it was written in."""

from __future__ import annotations

from dataclasses import dataclass

USER, ASSISTANT = "user", "assistant"


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance. `trained` marks an assistant turn whose tokens are targets; it is false for users."""

    role: str
    content: str
    trained: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that alternate user, assistant, user, ... and the system text ("" where there is none)."""

    turns: tuple[Turn, ...]
    system: str = ""

    def without_oldest(self, exchanges: int) -> Conversation:
        """The same conversation without its first `exchanges` pairs of user and assistant turns."""
        return Conversation(self.turns[2 * exchanges :], self.system)


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt, which ends with a user turn, and two ways in which the dialogue may go on from there.

    Attributes:
        chosen, rejected: turns that begin and end with the assistant's.
        score_difference: the score of the chosen answer less that of the rejected one, where the record has scores.
    """

    prompt: Conversation
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    score_difference: float | None = None


@dataclass(frozen=True, slots=True)
class PlainText:
    """A document for stage PT; every token of it is a target."""

    text: str
