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
class PlainText:
    """A document for stage PT; every token of it is a target."""

    text: str
