"""Recordings, an encoder's inputs, and a template that takes recordings, for tests of the data path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from erniekit.data.conversation import Conversation, Turn
from erniekit.data.media.clip import AudioInputs, Clip
from erniekit.data.templates.ernie import Segment, TemplateRefusedError
from erniekit.data.tokenizers.tokenizer import Tokenizer
from tests.data.media.sounds import RATE, tone, write

PLACEHOLDER = "<mask:0>"
WINDOW_FRAMES = 20  # of 10 ms


def audio_inputs(tokenizer: Tokenizer) -> AudioInputs:
    """An encoder with windows of 0.2 s, of which each has a state for every four frames of sound."""
    placeholder_id = tokenizer.token_id(PLACEHOLDER)
    assert placeholder_id is not None
    return AudioInputs(placeholder_id, 8, WINDOW_FRAMES, WINDOW_FRAMES // 4, lambda frames: -(-frames // 4))


def write_recording(path: Path, seconds: float, *, rate: int = RATE, pitch: float = 440.0) -> Path:
    """Write a tone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(write(path, tone(seconds, rate, pitch), rate))


def marked(turn: Turn, mark: str = PLACEHOLDER) -> str:
    """The text of a turn with a mark where each clip stands."""
    return "".join(part if isinstance(part, str) else mark for part in turn.parts)


class ListeningTemplate:
    """Writes a placeholder for each clip; `forgets` writes none, and `repeats` two."""

    variable_names: frozenset[str] = frozenset()
    end_of_turn_target = None

    def __init__(self, tokenizer: Tokenizer, mark: str = PLACEHOLDER) -> None:
        self.stop_token_ids = (tokenizer.eos_id,)
        self.mark = mark
        self.fingerprint = f"listening {mark}"

    def render(self, conversation: Conversation) -> list[Segment]:
        segments = []
        for turn in conversation.turns:
            if turn.role == "user":
                segments.append(Segment(f"<s>User: {marked(turn, self.mark)}\nAssistant: ", trained=False))
            else:
                segments.append(Segment(f"{marked(turn, self.mark)}</s>", turn.trained))
        return segments

    def render_many(self, conversations: Sequence[Conversation]) -> list[list[Segment] | TemplateRefusedError]:
        return [self.render(conversation) for conversation in conversations]


def clip_of(path: Path, start: float = 0.0, end: float | None = None) -> Clip:
    return Clip(str(path), start, end)
