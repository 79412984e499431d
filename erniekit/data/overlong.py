"""Judge by their characters whether dialogues and pairs are too long, where encoding them would take long.

Encoding 10 million characters takes a gigabyte. No text has so many characters per token that they could fit.
"""

from __future__ import annotations

import json
from dataclasses import replace

from erniekit.data.conversation import USER, Conversation, PlainText, Preference, Turn
from erniekit.data.formats.format import Record

MAX_CHARACTERS_PER_TOKEN = 100  # on average
MIN_CHARACTERS_TO_JUDGE = 1_000_000  # shorter texts are always encoded


def character_limit(max_seq_len: int) -> int:
    """Return the number of characters above which a record has more than `max_seq_len` tokens."""
    return max(MIN_CHARACTERS_TO_JUDGE, MAX_CHARACTERS_PER_TOKEN * max_seq_len)


def count_characters(record: Record) -> int:
    """Return the number of characters of a record's texts."""
    if isinstance(record, PlainText):
        return len(record.text)
    if isinstance(record, Preference):
        return count_characters(record.prompt) + sum(map(_turn_characters, (*record.chosen, *record.rejected)))
    tools = len(json.dumps(record.tools)) if record.tools else 0
    return len(record.system) + tools + sum(map(_turn_characters, record.turns))


def _turn_characters(turn: Turn) -> int:
    fields = len(json.dumps(turn.fields, ensure_ascii=False)) if turn.fields else 0
    return len(turn.content) + len(turn.thoughts) + fields


def last_rounds(record: Conversation | Preference, limit: int) -> Conversation | Preference | None:
    """Return the record with as many of its last rounds as have at most `limit` characters; None if not one does."""
    if isinstance(record, Preference):
        prompt = last_rounds(record.prompt, limit - count_characters(replace(record, prompt=Conversation(()))))
        return replace(record, prompt=prompt) if isinstance(prompt, Conversation) else None
    left, kept = limit - len(record.system), 0
    for turn in reversed(record.turns):
        left -= _turn_characters(turn)
        if left < 0:
            break
        kept += turn.role == USER
    return record.drop_oldest_rounds(record.rounds - kept) if kept else None
