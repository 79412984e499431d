"""Read prompts from a file: one prompt per line, or records of dialogues that lack their last answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Conversation, Turn
from erniekit.data.formats.chat import PARSERS
from erniekit.data.formats.json import read_json_values
from erniekit.data.formats.problems import MalformedError, RecordProblem, shorten
from erniekit.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
_FORMAT_BY_FIELD = {
    "messages": "messages",
    "src": "erniekit",
    "instruction": "alpaca",
}  # the field by which a format is recognised
_MAX_SHOWN_PROBLEMS = 20
_PLACEHOLDER_ANSWER = "-"  # replaces the missing answer while a record is parsed; dropped afterwards


@dataclass(frozen=True)
class Prompt:
    """A dialogue that ends with the user's message.

    Attributes:
        line: in the file, from 1.
        conversation: the dialogue that the model answers.
        reference: the answer in the record; None if it has none.
    """

    line: int
    conversation: Conversation
    reference: str | None = None

    @property
    def text(self) -> str:
        """The message to be answered."""
        return self.conversation.turns[-1].content


def read_prompts(path: Path) -> list[Prompt]:
    """Return all prompts of a file, in order.

    A `.jsonl` or `.json` file contains records of the formats `messages`, `erniekit` and `alpaca`; their last answer
    may be missing and is not shown to the model. Any other file contains a prompt on each line that is not blank.

    Raises:
        DataError: the file cannot be read, has no prompt, or is malformed (every bad line is listed).
    """
    items = list(_records(path) if path.suffix.lower() in JSON_SUFFIXES else _lines(path))
    problems = [str(item) for item in items if isinstance(item, RecordProblem)]
    if problems:
        hidden = len(problems) - _MAX_SHOWN_PROBLEMS
        more = [f"and {hidden:,} more"] if hidden > 0 else []
        raise DataError("\n".join([*problems[:_MAX_SHOWN_PROBLEMS], *more]))
    prompts = [item for item in items if isinstance(item, Prompt)]
    if not prompts:
        raise DataError(f"{path}: contains no prompt")
    return prompts


def _lines(path: Path) -> Iterator[Prompt | RecordProblem]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        yield RecordProblem(str(path), 0, "encoding", "UTF-8", f"another one (byte {error.start:,})")
        return
    except OSError as error:
        yield RecordProblem(str(path), 0, "file", "a readable file", error.strerror or str(error))
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Prompt(number, Conversation((Turn(USER, line.strip()),)))


def _records(path: Path) -> Iterator[Prompt | RecordProblem]:
    for item in read_json_values(path):
        if isinstance(item, RecordProblem):
            yield item
            continue
        line, value = item
        try:
            yield _prompt(line, value)
        except MalformedError as error:
            yield RecordProblem(str(path), line, error.field, error.expected, error.got)


def _prompt(line: int, value: object) -> Prompt:
    kind = next((kind for mark, kind in _FORMAT_BY_FIELD.items() if isinstance(value, dict) and mark in value), None)
    if kind is None:
        raise MalformedError("record", "an object with messages, src or instruction", shorten(value))
    assert isinstance(value, dict)
    record, answered = _COMPLETERS[kind](value)
    conversation = PARSERS[kind](record)
    assert isinstance(conversation, Conversation)
    prompt = Conversation(conversation.turns[:-1], conversation.system, conversation.tools)
    return Prompt(line, prompt, conversation.turns[-1].content if answered else None)


def _completed_messages(record: dict) -> tuple[dict, bool]:
    """Complete a record for the parser: add a last answer and drop labels, which are for training."""
    messages = record["messages"]
    if not isinstance(messages, list):
        return record, True
    plain = [
        {key: field for key, field in message.items() if key not in ("label", "weight")}
        if isinstance(message, dict)
        else message
        for message in messages
    ]
    last = messages[-1] if messages else None
    answered = not (isinstance(last, dict) and last.get("role") in (USER, *TOOL_ROLES))
    if not answered:
        plain.append({"role": ASSISTANT, "content": _PLACEHOLDER_ANSWER})
    return {"messages": plain, "tools": record.get("tools")}, answered


def _completed_erniekit(record: dict) -> tuple[dict, bool]:
    questions = record["src"] if isinstance(record["src"], list) else [record["src"]]
    answers = record.get("tgt") or []
    answers = list(answers) if isinstance(answers, list) else [answers]
    answered = len(answers) != len(questions) - 1 and bool(answers[-1:] and answers[-1])
    if not answered:
        answers = [*answers[: len(questions) - 1], _PLACEHOLDER_ANSWER]
    completed = {key: field for key, field in record.items() if key != "label"}
    return {**completed, "src": questions, "tgt": answers}, answered


def _completed_alpaca(record: dict) -> tuple[dict, bool]:
    answered = bool(record.get("output"))
    return (record if answered else {**record, "output": _PLACEHOLDER_ANSWER}), answered


_COMPLETERS = {"messages": _completed_messages, "erniekit": _completed_erniekit, "alpaca": _completed_alpaca}
