"""Read prompts from a file: one prompt per line, or records of dialogues that lack their last answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES, USER, Conversation, Turn
from erniekit.data.formats.asr import TEXT_FIELDS, is_asr_record
from erniekit.data.formats.files import parse_values
from erniekit.data.formats.media_paths import media_folders
from erniekit.data.formats.problems import MalformedError, RecordProblem, shorten
from erniekit.data.formats.recordings import AUDIO_LISTS
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.data.formats.sharegpt import as_messages
from erniekit.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
_MAX_SHOWN_PROBLEMS = 20
_PLACEHOLDER_ANSWER = "-"  # replaces the missing answer while a record is parsed; dropped afterwards


@dataclass(frozen=True)
class Prompt:
    """A dialogue that ends with the user's message.

    Attributes:
        line: in the file, from 1.
        conversation: the dialogue that the model answers.
        answered: the answer in the record; None if it has none.
    """

    line: int
    conversation: Conversation
    answered: Turn | None = None

    @property
    def text(self) -> str:
        """The message to be answered."""
        return self.conversation.turns[-1].written()

    @property
    def reference(self) -> str | None:
        """The text of the answer in the record."""
        return None if self.answered is None else self.answered.written()


def read_prompts(path: Path, media_dir: Sequence[str] = ()) -> list[Prompt]:
    """Return all prompts of a file, in order.

    A `.jsonl` or `.json` file contains records of any format of dialogues; their last answer may be missing and is not
    shown to the model. Any other file contains a prompt on each line that is not blank.

    Args:
        media_dir: the folders below which the recordings of records lie; () for the folder of the file.

    Raises:
        DataError: the file cannot be read, has no prompt, or is malformed (every bad line is listed).
    """
    items = list(_records(path, media_dir) if path.suffix.lower() in JSON_SUFFIXES else _lines(path))
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


def _records(path: Path, media_dir: Sequence[str]) -> Iterator[Prompt | RecordProblem]:
    folders = media_folders(path, media_dir)
    yield from parse_values(path, lambda line, value: prompt_of_record(line, value, folders))


def prompt_of_record(line: int, value: object, folders: Sequence[str], kind: str = "") -> Prompt:
    """Return the prompt of one record.

    Args:
        folders: below which its recordings lie.
        kind: the format that it must have; "" for any of dialogues.

    Raises:
        MalformedError: it is no record of a dialogue, or not of this format.
    """
    marks = _MARKS.get(kind, tuple(_COMPLETERS))
    mark = next((mark for mark in marks if isinstance(value, dict) and mark in value), None)
    if kind and mark is None:
        raise MalformedError("record", f"an object with {' or '.join(marks)}, as {kind} has", shorten(value))
    if mark is not None and isinstance(value, dict):
        kind, complete = _COMPLETERS[mark]
    elif isinstance(value, dict) and is_asr_record(value):
        kind, complete = "asr", _completed_transcript
    else:
        expected = f"an object with one of {', '.join(_COMPLETERS)}, or with a recording"
        raise MalformedError("record", expected, shorten(value))
    record, answered = complete(value)
    recordings = {} if kind == "asr" else {name: value[name] for name in AUDIO_LISTS if name in value}
    conversation = parse_record(FORMATS[kind], {**record, **recordings}, folders)
    assert isinstance(conversation, Conversation)
    prompt = replace(conversation, turns=conversation.turns[:-1])
    return Prompt(line, prompt, conversation.turns[-1] if answered else None)


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


def _completed_sharegpt(record: dict) -> tuple[dict, bool]:
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    messages = system + as_messages(record["conversations"], "conversations")
    return _completed_messages({"messages": messages, "tools": record.get("tools")})


def _completed_prompt(record: dict) -> tuple[dict, bool]:
    prompt, completion = record["prompt"], record.get("completion") or []
    messages = prompt if isinstance(prompt, list) else [{"role": USER, "content": prompt}]
    answer = completion if isinstance(completion, list) else [{"role": ASSISTANT, "content": completion}]
    return _completed_messages({"messages": [*messages, *answer], "tools": record.get("tools")})


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


def _completed_transcript(record: dict) -> tuple[dict, bool]:
    answered = any(record.get(name) for name in TEXT_FIELDS)
    return (record if answered else {**record, TEXT_FIELDS[0]: _PLACEHOLDER_ANSWER}), answered


# By the format that a user names: the fields of which its records have one.
_MARKS = {
    "erniekit": ("src",), "alpaca": ("instruction",), "messages": ("messages", "prompt"),
    "sharegpt": ("conversations",), "prompt_completion": ("prompt",),
}  # fmt: skip
# By the field that tells a record's format: the format in which its completed form is parsed, and what completes it.
_COMPLETERS: dict[str, tuple[str, Callable[[dict], tuple[dict, bool]]]] = {
    "messages": ("messages", _completed_messages),
    "conversations": ("messages", _completed_sharegpt),
    "src": ("erniekit", _completed_erniekit),
    "instruction": ("alpaca", _completed_alpaca),
    "prompt": ("messages", _completed_prompt),
}
