"""Which texts are spoken, as a command or a file names them: how, and in whose voice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.data.formats.files import parse_values
from erniekit.data.formats.problems import MalformedError, RecordProblem, describe_value
from erniekit.errors import DataError

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_FIELDS = ("text", "language", "instruct", "voice", "voice_text", "id")
NUMBER_FIELDS = ("duration", "speed")
MAX_SHOWN_PROBLEMS = 20


@dataclass(frozen=True)
class SpokenLine:
    """A text to be spoken.

    Attributes:
        place: of the text, for messages.
        language, instruct, voice_text: "" where they are not given.
        voice: the recording of a voice; None: not given.
        duration, speed: None where they are not given.
        id: names its file; "": its number does.
    """

    text: str
    place: str
    language: str = ""
    instruct: str = ""
    voice: Path | None = None
    voice_text: str = ""
    duration: float | None = None
    speed: float | None = None
    id: str = ""


def given_texts(texts: Sequence[str]) -> list[SpokenLine]:
    """Return the texts of a command."""
    return [SpokenLine(text, "--text" if len(texts) == 1 else f"--text {n}") for n, text in enumerate(texts, start=1)]


def read_texts(path: Path) -> list[SpokenLine]:
    """Return the texts of a file, in order.

    A `.jsonl` or `.json` file has an object for each, with `text` and where they are wanted `language`, `instruct`,
    `voice` (a recording, from the folder of the file), `voice_text`, `duration`, `speed` and `id`. Any other file has a
    text on each line that is not blank.

    Raises:
        DataError: the file cannot be read, has no text, or is malformed (every bad line is listed); or two have one id.
    """
    if path.suffix.lower() in JSON_SUFFIXES:
        items: list[SpokenLine | RecordProblem] = list(
            parse_values(path, lambda line, value: _record(path, line, value))
        )
    else:
        items = list(_lines(path))
    problems = [str(item) for item in items if isinstance(item, RecordProblem)]
    if problems:
        hidden = len(problems) - MAX_SHOWN_PROBLEMS
        raise DataError("\n".join([*problems[:MAX_SHOWN_PROBLEMS], *([f"and {hidden:,} more"] if hidden > 0 else [])]))
    lines = [item for item in items if isinstance(item, SpokenLine)]
    if not lines:
        raise DataError(f"{path}: contains no text")
    owners: dict[str, str] = {}
    for line in lines:
        if line.id and owners.setdefault(line.id, line.place) != line.place:
            raise DataError(f"{line.place}: id: expected one that no other text has, got that of {owners[line.id]}")
    return lines


def _lines(path: Path) -> Iterator[SpokenLine | RecordProblem]:
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
            yield SpokenLine(line.strip(), f"{path}:{number}")


def _record(path: Path, line: int, value: object) -> SpokenLine:
    if not isinstance(value, dict):
        raise MalformedError("record", "an object with `text`", describe_value(value))
    if unknown := sorted(str(name) for name in value if name not in (*TEXT_FIELDS, *NUMBER_FIELDS)):
        raise MalformedError(unknown[0], f"one of {', '.join((*TEXT_FIELDS, *NUMBER_FIELDS))}", "another field")
    texts = {name: _text(value, name) for name in TEXT_FIELDS}
    numbers = {name: _number(value, name) for name in NUMBER_FIELDS}
    voice = path.parent / Path(texts["voice"]).expanduser() if texts["voice"] else None
    if "/" in texts["id"] or texts["id"] in (".", "..") or "\0" in texts["id"]:
        raise MalformedError("id", "a name without a slash, which becomes that of a file", describe_value(texts["id"]))
    return SpokenLine(
        texts["text"],
        f"{path}:{line}",
        texts["language"],
        texts["instruct"],
        voice,
        texts["voice_text"],
        numbers["duration"],
        numbers["speed"],
        texts["id"],
    )


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None and name != "text":
        return ""
    if not isinstance(value, str) or (name == "text" and not value.strip()):
        raise MalformedError(
            name, "a text" if value is None or isinstance(value, str) else "text", describe_value(value)
        )
    return value


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise MalformedError(name, "a number above 0", describe_value(value))
    return float(value)
