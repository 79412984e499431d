"""Judge by their characters whether dialogues and pairs are too long, where encoding them would take long.

Encoding 10 million characters takes a gigabyte. No text has so many characters per token that they could fit.
"""

from __future__ import annotations

from dataclasses import replace

from erniekit.data.conversation import USER, Conversation, Preference, Turn

MAX_CHARACTERS_PER_TOKEN = 100  # on average
MIN_CHARACTERS_TO_JUDGE = 1_000_000  # shorter texts are always encoded


def character_limit(max_seq_len: int) -> int:
    """Return the number of characters above which a record has more than `max_seq_len` tokens."""
    return max(MIN_CHARACTERS_TO_JUDGE, MAX_CHARACTERS_PER_TOKEN * max_seq_len)


def count_characters(record: Conversation | Preference) -> int:
    """Return the number of characters of a record's texts up to its last target, behind which nothing is encoded."""
    if isinstance(record, Preference):
        answers = (*_until_last_target(record.chosen), *_until_last_target(record.rejected))
        return count_characters(record.prompt) + sum(len(turn.content) for turn in answers)
    return len(record.system) + sum(len(turn.content) for turn in _until_last_target(record.turns))


def last_rounds(record: Conversation | Preference, limit: int) -> Conversation | Preference | None:
    """Return the record with as many of its last rounds as have at most `limit` characters; None if not one does."""
    if isinstance(record, Preference):
        prompt = last_rounds(record.prompt, limit - count_characters(replace(record, prompt=Conversation(()))))
        return replace(record, prompt=prompt) if isinstance(prompt, Conversation) else None
    turns = _until_last_target(record.turns)
    left, kept = limit - len(record.system), 0
    for turn in reversed(turns):
        left -= len(turn.content)
        if left < 0:
            break
        kept += turn.role == USER
    return record.drop_oldest_rounds(Conversation(turns).rounds - kept) if kept else None


def _until_last_target(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Return the turns up to the last trained one; all of a prompt, which has none."""
    length = max((number for number, turn in enumerate(turns, start=1) if turn.trained), default=len(turns))
    return turns[:length]
