"""Records of the four formats, turned into conversations or texts; docs/data.md describes the formats for users.

| kind | a record |
|---|---|
| erniekit | `src`, `tgt`: a string or a list of strings each; optional `system`, `label` (0 or 1 a turn), `is_system` |
| alpaca | `instruction`, `output`; optional `input`, `history` (pairs), `system` |
| messages | `messages`: `role` and `content`, assistant messages with an optional `label` or `weight` (0 or 1) |
| text | `text`, or as upstream has it `tgt` without `src` (a string or a list of lines); for stage PT |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from erniekit.data.conversation import ASSISTANT, USER, Conversation, PlainText, Turn
from erniekit.data.fields import UnusedFields
from erniekit.data.json_records import read_json_values
from erniekit.data.problems import RecordProblem, shorten

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedError(Exception):
    """Raised while one record is parsed (by one of PARSERS); becomes a RecordProblem with file and line."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(field)
        self.field, self.expected, self.got = field, expected, got


def read_records(
    path: str | Path, kind: str, unused: UnusedFields | None = None
) -> Iterator[tuple[int, Conversation | PlainText] | RecordProblem]:
    """Yield (line, record) for every record of a file, in file order, and a problem for each malformed one.

    Streams: one record at a time is in memory. Nothing is raised for what the file holds; a missing file, an empty one,
    text that is not UTF-8 and broken JSON are problems too.

    Args:
        path: a file of one JSON object a line, or of one JSON array of objects.
        kind: one of KINDS.
        unused: counts the fields that are not used.
    """
    parse = PARSERS[kind]
    name = str(path)
    for item in read_json_values(path):
        if isinstance(item, RecordProblem):
            yield item
            continue
        line, value = item
        try:
            if not isinstance(value, dict):
                raise MalformedError("record", "a JSON object", shorten(value))
            record = parse(value)
        except MalformedError as error:
            yield RecordProblem(name, line, error.field, error.expected, error.got)
            continue
        if unused is not None:
            unused.add(line, value)
        yield line, record


def _erniekit(record: dict) -> Conversation:
    questions = _texts(record, "src")
    answers = _texts(record, "tgt")
    if len(questions) != len(answers):
        raise MalformedError("tgt", f"as many items as src ({len(questions)})", f"{len(answers)}")
    labels = record.get("label")
    if labels is None:
        labels = [1] * len(answers)
    elif not isinstance(labels, list):
        labels = [labels]
    if len(labels) != len(answers):
        raise MalformedError("label", f"one 0 or 1 for each tgt ({len(answers)})", f"{len(labels)} of them")
    trained = [_flag(label, "label") for label in labels]
    system = _optional_text(record, "system")
    if _flag(record.get("is_system", 0), "is_system"):
        # upstream's older way to give a system text: the first exchange holds it, and what stands in tgt[0] is unused
        if not system:
            system = questions[0]
        questions, answers, trained = questions[1:], answers[1:], trained[1:]
        if not questions:
            raise MalformedError("src", "an exchange after the system text (is_system is 1)", "only the system text")
    for name, texts in (("src", questions), ("tgt", answers)):
        for number, text in enumerate(texts):
            if not text:
                raise MalformedError(f"{name}[{number}]", "a text", "an empty string")
    return _conversation(zip(questions, answers, trained, strict=True), system, "label")


def _alpaca(record: dict) -> Conversation:
    question = _text(record.get("instruction"), "instruction")
    addition = _optional_text(record, "input")
    question = "\n".join(part for part in (question, addition) if part)
    if not question:
        raise MalformedError("instruction", "a text", "an empty string")
    answer = _text(record.get("output"), "output")
    if not answer:
        raise MalformedError("output", "a text", "an empty string")
    history = record.get("history")
    if history is None:
        history = []
    if not isinstance(history, list):
        raise MalformedError("history", "a list of [question, answer] pairs", shorten(history))
    exchanges = []
    for number, pair in enumerate(history):
        name = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedError(name, "a pair [question, answer]", shorten(pair))
        exchanges.append((_text(pair[0], f"{name}[0]"), _text(pair[1], f"{name}[1]"), True))
        if not all(exchanges[-1][:2]):
            raise MalformedError(name, "two texts", "an empty string")
    return _conversation([*exchanges, (question, answer, True)], _optional_text(record, "system"), "output")


def _messages(record: dict) -> Conversation:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise MalformedError("messages", "a list of messages", _describe(messages))
    system = ""
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, dict):
            raise MalformedError(name, "an object with role and content", shorten(message))
        role = message.get("role")
        content = _text(message.get("content"), f"{name}.content")
        if role == "system" and number == 0:
            system = content
            continue
        expected = USER if len(turns) % 2 == 0 else ASSISTANT
        if role != expected:
            first = "system or " if number == 0 else ""
            raise MalformedError(f"{name}.role", f"{first}{expected}", _describe(role))
        if not content:
            raise MalformedError(f"{name}.content", "a text", "an empty string")
        turns.append(Turn(role, content, role == ASSISTANT and _message_is_trained(message, name)))
    if not turns or turns[-1].role != ASSISTANT:
        raise MalformedError("messages", "the last message to be the assistant's", _describe(messages[-1].get("role")))
    return _with_target(Conversation(tuple(turns), system), "messages")


def _message_is_trained(message: dict, name: str) -> bool:
    if "label" in message and "weight" in message:
        raise MalformedError(name, "either label or weight", "both")
    key = "weight" if "weight" in message else "label"
    return _flag(message.get(key, 1), f"{name}.{key}")


def _plain_text(record: dict) -> PlainText:
    name = "tgt" if "text" not in record and "src" not in record and "tgt" in record else "text"
    parts = record.get(name)
    if name == "text" or not isinstance(parts, list):
        parts = [parts]
    text = "\n".join(_text(part, name, strip=False) for part in parts)
    if not text.strip():
        raise MalformedError(name, "a text", "an empty string")
    return PlainText(text)


def _conversation(exchanges: Iterable[tuple[str, str, bool]], system: str, label_field: str) -> Conversation:
    turns = []
    for question, answer, trained in exchanges:
        turns += [Turn(USER, question), Turn(ASSISTANT, answer, trained)]
    return _with_target(Conversation(tuple(turns), system), label_field)


def _with_target(conversation: Conversation, field: str) -> Conversation:
    if not any(turn.trained for turn in conversation.turns):
        raise MalformedError(field, "at least one assistant turn with label 1", "none: nothing would be trained")
    return conversation


def _texts(record: dict, name: str) -> list[str]:
    value = record.get(name)
    if isinstance(value, str):
        return [_text(value, name)]
    if not isinstance(value, list) or not value:
        raise MalformedError(name, "a string or a list of strings", _describe(value))
    return [_text(item, f"{name}[{number}]") for number, item in enumerate(value)]


def _optional_text(record: dict, name: str) -> str:
    value = record.get(name)
    return "" if value is None else _text(value, name)


def _text(value: object, name: str, strip: bool = True) -> str:
    """A string that UTF-8 can hold. White space around a turn is dropped, as upstream does: templates bring theirs."""
    if not isinstance(value, str):
        raise MalformedError(name, "a string", _describe(value))
    if not value.isascii() and (match := _LONE_SURROGATE.search(value)):
        raise MalformedError(name, "Unicode text", f"half of a surrogate pair at character {match.start():,}")
    return value.strip() if strip else value


def _flag(value: object, name: str) -> bool:
    if value not in (0, 1):  # true, false, 0.0 and 1.0 are equal to these
        raise MalformedError(name, "0 or 1", shorten(value))
    return bool(value)


def _describe(value: object) -> str:
    return "nothing" if value is None else shorten(value)


PARSERS: dict[str, Callable[[dict], Conversation | PlainText]] = {
    "erniekit": _erniekit,
    "alpaca": _alpaca,
    "messages": _messages,
    "text": _plain_text,
}
KINDS = tuple(PARSERS)
