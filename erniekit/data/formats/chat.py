"""Parse records of four formats into conversations or texts; docs/data.md describes the formats for users.

The formats of pairs, for stage DPO, are in `preference`.

| kind | a record |
|---|---|
| erniekit | `src`, `tgt`: a string or a list of strings each; optional `system`, `label` (0 or 1 per turn), `is_system`
|
| alpaca | `instruction`, `output`; optional `input`, `history` (pairs), `system` |
| messages | `messages`: `role`, `content`, for assistants also `label` or `weight` (0 or 1), `tool_calls`; `tools` |
| text | `text`, or in upstream's form `tgt` without `src` (a string or a list of lines); for stage PT |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from erniekit.data.conversation import ASSISTANT, USER, Conversation, PlainText, Preference, Turn
from erniekit.data.formats.json import read_json_values
from erniekit.data.formats.messages import parse_messages, parse_tools
from erniekit.data.formats.preference import PREFERENCE_PARSERS
from erniekit.data.formats.problems import (
    MalformedError,
    RecordProblem,
    UnusedFields,
    describe_value,
    parse_flag,
    parse_history,
    parse_optional_text,
    parse_text,
    parse_texts,
    shorten,
    split_system,
)
from erniekit.data.formats.table import PARQUET, is_hub_dataset, read_hub_values, read_parquet_values


def read_records(
    path: str | Path, kind: str, unused: UnusedFields | None = None
) -> Iterator[tuple[int, Record] | RecordProblem]:
    """Yield (line, record) for every record of a file, in file order, and a problem for each malformed one.

    Streams: one record at a time is in memory. The content of the file never raises: a missing or empty file, text that
    is not UTF-8 and broken JSON are problems too.

    Args:
            path: a file with one JSON object per line or one JSON array of objects, a Parquet file, or the name of a
            data set of the Hugging Face hub.
        kind: one of KINDS.
        unused: counts the fields that the format does not use.
    """
    parse = PARSERS[kind]
    name = str(path)
    for item in _values(path):
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


def _values(path: str | Path) -> Iterator[tuple[int, object] | RecordProblem]:
    if Path(path).suffix == PARQUET:
        return read_parquet_values(path)
    return read_hub_values(path) if is_hub_dataset(path) else read_json_values(path)


def _erniekit(record: dict) -> Conversation:
    questions = parse_texts(record, "src")
    answers = parse_texts(record, "tgt")
    if len(questions) != len(answers):
        raise MalformedError("tgt", f"as many items as src ({len(questions)})", f"{len(answers)}")
    labels = record.get("label")
    if labels is None:
        labels = [1] * len(answers)
    elif not isinstance(labels, list):
        labels = [labels]
    if len(labels) != len(answers):
        raise MalformedError("label", f"one 0 or 1 for each tgt ({len(answers)})", f"{len(labels)} of them")
    trained = [parse_flag(label, "label") for label in labels]
    system, questions, answers = split_system(record, questions, answers)
    return _conversation(zip(questions, answers, trained[-len(answers) :], strict=True), system, "label")


def _alpaca(record: dict) -> Conversation:
    question = parse_text(record.get("instruction"), "instruction")
    addition = parse_optional_text(record, "input")
    question = "\n".join(part for part in (question, addition) if part)
    if not question:
        raise MalformedError("instruction", "a text", "an empty string")
    answer = parse_text(record.get("output"), "output")
    if not answer:
        raise MalformedError("output", "a text", "an empty string")
    rounds = [(*qa_pair, True) for qa_pair in parse_history(record)]
    return _conversation([*rounds, (question, answer, True)], parse_optional_text(record, "system"), "output")


def _messages(record: dict) -> Conversation:
    system, turns = parse_messages(record.get("messages"), "messages", tools=True)
    if not turns or turns[-1].role != ASSISTANT:
        last = record["messages"][-1].get("role")
        raise MalformedError("messages", "the last message to be the assistant's", describe_value(last))
    return _with_target(Conversation(tuple(turns), system, parse_tools(record)), "messages")


def _plain_text(record: dict) -> PlainText:
    name = "tgt" if "text" not in record and "src" not in record and "tgt" in record else "text"
    parts = record.get(name)
    if name == "text" or not isinstance(parts, list):
        parts = [parts]
    text = "\n".join(parse_text(part, name, strip=False) for part in parts)
    if not text.strip():
        raise MalformedError(name, "a text", "an empty string")
    return PlainText(text)


def _conversation(rounds: Iterable[tuple[str, str, bool]], system: str, label_field: str) -> Conversation:
    turns = []
    for question, answer, trained in rounds:
        turns += [Turn(USER, question), Turn(ASSISTANT, answer, trained)]
    return _with_target(Conversation(tuple(turns), system), label_field)


def _with_target(conversation: Conversation, field: str) -> Conversation:
    if not any(turn.trained for turn in conversation.turns):
        raise MalformedError(field, "at least one assistant turn with label 1", "none: nothing would be trained")
    return conversation


Record = Conversation | PlainText | Preference
PARSERS: dict[str, Callable[[dict], Record]] = {
    "erniekit": _erniekit,
    "alpaca": _alpaca,
    "messages": _messages,
    "text": _plain_text,
    **PREFERENCE_PARSERS,
}
KINDS = tuple(PARSERS)
