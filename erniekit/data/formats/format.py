"""What a format of records is: how its records are told from others, what fields they have, and how one is parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from erniekit.data.conversation import Conversation, PlainText, Preference
from erniekit.data.units import AlignedUnits, SpokenText, TokenIds

Record = Conversation | PlainText | Preference | TokenIds | AlignedUnits | SpokenText
RecordKind = Literal["text", "dialogues", "pairs", "verdicts", "tokens", "codes"]


@dataclass(frozen=True)
class Format:
    """A format of records; `registry.FORMATS` has all of them.

    Attributes:
        name: its word in `train_dataset_type`.
        title: its name in messages to users.
        required: the fields that it is known by, in messages to users.
        records: what a record holds; a stage trains one of the first four, PT and SFT train `tokens`, too, and
            TTS trains `codes`.
        fields: the fields of a record that are used.
        fits: whether a record looks like one of this format, judged by its characteristic fields.
        parse: turns a record into its parsed form, or raises MalformedError.
        message_lists: the fields that hold lists of messages in OpenAI's form.
        calls_tools: whether these messages may hold calls of tools and their results.
        alternatives: groups of fields with the same meaning, of which a record's first counts.
    """

    name: str
    title: str
    required: str
    records: RecordKind
    fields: frozenset[str]
    fits: Callable[[dict], bool]
    parse: Callable[[dict], Record]
    message_lists: tuple[str, ...] = ()
    calls_tools: bool = False
    alternatives: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class RefusedFormat:
    """Records that are recognised and refused.

    Attributes:
        field: what an error names as the place of the problem.
        title: what such a record is.
        fits: as for `Format`.
        reason: what ERNIEKit does not do, in a sentence's words.
        allowed: the kinds of records of formats that do not refuse them.
    """

    field: str
    title: str
    fits: Callable[[dict], bool]
    reason: str
    allowed: tuple[RecordKind, ...] = ()
