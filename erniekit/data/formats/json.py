"""Stream JSON values with the line they start on, from files of one value per line and from files of one array.

At most one record and one read block are in memory. Only an array that is broken somewhere is read to its end from
there, because until then an unfinished value looks like a broken one.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from erniekit.data.formats.encodings import MARK_LENGTH, decoded_lines, encoding_problem, foreign_encoding
from erniekit.data.formats.problems import Effect, RecordProblem, field_name, shorten

BLOCK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


def read_json_values(path: str | Path) -> Iterator[tuple[int, object] | RecordProblem]:
    """Yield (line, value) for every JSON value of a file, and a problem for everything that cannot be read.

    A file whose first character is `[` is read as one array, any other as one value per line (blank lines are skipped).
    Lines count from 1. The text must be UTF-8, with or without a byte order mark. An object with two fields of the same
    name is a problem, because only one of them could be used.
    """
    name = str(path)
    try:
        with open(path, "rb") as file:
            head = file.read(MARK_LENGTH)
            problem = foreign_encoding(name, head)
            if problem is not None:
                yield problem
                return
            start = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
            file.seek(start)
            first = _first_character(file)
            file.seek(start)
            if not first:
                yield RecordProblem(name, 0, "file", "at least one record", "an empty file")
            elif first == b"[":
                yield from _array_values(name, file, start)
            elif first == b"{" and (line := _multiline_object_line(file)):
                expected = "one object a line, or one array of objects"
                yield RecordProblem(name, line, "JSON", expected, "one object over several lines", Effect.STOP)
            elif first != b"{" and (problem := _not_json(name, file)):
                yield problem
            else:
                file.seek(start)
                yield from _line_values(name, file, start)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error))
        yield RecordProblem(name, 0, "file", "a readable file", reason)


def _first_character(file: BinaryIO) -> bytes:
    while block := file.read(4096):
        if stripped := block.lstrip(b" \t\r\n"):
            return stripped[:1]
    return b""


def _not_json(name: str, file: BinaryIO) -> RecordProblem | None:
    """Return the problem of a file none of whose first lines begins like a JSON object: it has another format."""
    lines = file.read(BLOCK_BYTES).splitlines()
    if any(line.lstrip().startswith(b"{") for line in lines):
        return None
    first = next(line for line in lines if line.strip()).decode("utf-8", errors="replace")
    expected = "JSON lines or a JSON array (the name of a table ends in .csv, .tsv or .parquet, of plain text in .txt)"
    return RecordProblem(name, 0, "file", expected, shorten(first))


def _multiline_object_line(file: BinaryIO) -> int:
    """Return the line on which the file begins with one object that spans several lines; 0 if it does not.

    The first block decides, once for the file: read line by line, every line would be a problem.
    """
    block = file.read(BLOCK_BYTES)
    if len(block) == BLOCK_BYTES:
        block = block[: block.rfind(b"\n") + 1]  # the block then ends between two lines, not within a value
    block_text = block.decode("utf-8", errors="ignore")
    text = block_text.lstrip()
    first, _, rest = text.partition("\n")
    if not rest.strip():
        return 0
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        several = end > len(first)
    except json.JSONDecodeError as error:
        several = first.strip() == "{" or _breaks_off(text, error)
    except (ValueError, RecursionError):
        return 0  # reading line by line reports the problem
    return 1 + block_text[: len(block_text) - len(text)].count("\n") if several else 0


class _Decoder:
    """Decode JSON and record a name that occurs twice in one object; a plain decoder silently drops the first value."""

    def __init__(self) -> None:
        self._json = json.JSONDecoder(object_pairs_hook=self._object)
        self.repeated: str | None = None

    def decode(self, text: str) -> object:
        self.repeated = None
        return self._json.decode(text)

    def raw_decode(self, text: str, position: int) -> tuple[object, int]:
        self.repeated = None
        return self._json.raw_decode(text, position)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            self.repeated = next(name for name, count in counts.items() if count > 1)
        return fields

    def item(self, name: str, line: int, value: object) -> tuple[int, object] | RecordProblem:
        """Return the value decoded last with its line, or a problem if a name was repeated."""
        if self.repeated is None:
            return line, value
        return RecordProblem(name, line, field_name(self.repeated), "one field of this name in an object", "several")


def _line_values(name: str, file: BinaryIO, offset: int) -> Iterator[tuple[int, object] | RecordProblem]:
    decoder = _Decoder()
    for item in decoded_lines(name, file, offset):
        if isinstance(item, RecordProblem):
            yield item
            continue
        number, text = item
        try:
            yield decoder.item(name, number, decoder.decode(text))
        except json.JSONDecodeError as error:
            yield _json_problem(name, number, text, error, f"{error.msg}, column {error.colno}")
        except (ValueError, RecursionError) as error:
            yield _unusable_value_problem(name, number, error)


def _array_values(name: str, file: BinaryIO, offset: int) -> Iterator[tuple[int, object] | RecordProblem]:
    window = _TextWindow(name, file, offset)
    decoder = _Decoder()
    try:
        window.skip_space()
        window.advance(1)  # "["
        window.skip_space()
        if window.peek() == "]":
            yield RecordProblem(name, 0, "file", "at least one record", "an empty array")
            return
        while True:
            line = window.line
            try:
                value, length = window.decode_value(decoder)
            except json.JSONDecodeError as error:
                line += window.text.count("\n", window.position, error.pos)
                yield replace(_json_problem(name, line, window.text, error, error.msg), effect=Effect.STOP)
                return
            except (ValueError, RecursionError) as error:
                yield replace(_unusable_value_problem(name, line, error), effect=Effect.STOP)
                return
            window.advance(length)
            yield decoder.item(name, line, value)
            window.skip_space()
            mark = window.peek()
            if mark not in {",", "]"}:
                got = shorten(mark) if mark else "the end of the file (truncated?)"
                expected = "',' or ']' after a record of the array"
                yield RecordProblem(name, window.line, "JSON", expected, got, Effect.STOP)
                return
            window.advance(1)
            window.skip_space()
            if mark == "]":
                if rest := window.peek():
                    expected = "nothing after the array"
                    yield RecordProblem(name, window.line, "JSON", expected, shorten(rest), Effect.STOP)
                return
    except _NotUtf8Error as error:
        yield replace(error.problem, effect=Effect.STOP)


class _NotUtf8Error(Exception):
    def __init__(self, problem: RecordProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class _TextWindow:
    """A moving window over a UTF-8 file that keeps track of the current line."""

    def __init__(self, name: str, file: BinaryIO, offset: int) -> None:
        self.name, self.file, self.offset = name, file, offset
        self.text, self.position, self.line = "", 0, 1
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ended = False

    def read_more(self, size: int = BLOCK_BYTES) -> bool:
        """Read the next block; return False at the end of the file."""
        if self._ended:
            return False
        block = self.file.read(size)
        pending = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.position)
            start = self.offset - pending
            line += error.object[: error.start].count(b"\n")
            raise _NotUtf8Error(encoding_problem(self.name, line, error.object, start, error)) from None
        if not block:
            self._ended = True
            return False
        self.offset += len(block)
        self.text = self.text[self.position :] + text
        self.position = 0
        return True

    def decode_value(self, decoder: _Decoder) -> tuple[object, int]:
        """Return the value that starts here and its length in characters; read until it is complete."""
        size = BLOCK_BYTES
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.position)
                length, at_edge = end - self.position, end == len(self.text)
                # A number may continue in the next block; every other value ends with a character of its own.
                if not at_edge or not self.read_more(size):
                    return value, length
            except json.JSONDecodeError:
                if not self.read_more(size):
                    raise
            size *= 2  # a long record is parsed again each time, so read twice as much

    def advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count

    def skip_space(self) -> None:
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None
            self.advance(match.end() - self.position)
            if self.position < len(self.text) or not self.read_more():
                return

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]


def _unusable_value_problem(name: str, line: int, error: ValueError | RecursionError) -> RecordProblem:
    what = "brackets nested too deeply" if isinstance(error, RecursionError) else "an integer of thousands of digits"
    return RecordProblem(name, line, "JSON", "a record", what)


def _json_problem(name: str, line: int, text: str, error: json.JSONDecodeError, reason: str) -> RecordProblem:
    got = (
        "a record that breaks off (truncated?)"
        if _breaks_off(text, error)
        else shorten(text[error.pos : error.pos + 30])
    )
    return RecordProblem(name, line, "JSON", f"one complete JSON value ({reason})", got)


def _breaks_off(text: str, error: json.JSONDecodeError) -> bool:
    return error.msg.startswith("Unterminated") or not text[error.pos :].strip()
