"""Open a data file of any kind and yield its values with their lines; tell what a file is that cannot be read."""

from __future__ import annotations

import codecs
import csv
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from erniekit.data.formats.encodings import (
    MARK_LENGTH,
    MAX_RECORD_BYTES,
    decoded_lines,
    encoding_problem,
    foreign_encoding,
)
from erniekit.data.formats.json import read_json_values
from erniekit.data.formats.problems import Effect, MalformedError, RecordProblem, shorten
from erniekit.data.formats.table import PARQUET, is_hub_dataset, read_hub_values, read_parquet_values

T = TypeVar("T")
Values = Iterator[tuple[int, object] | RecordProblem]
TABLES = (".csv", ".tsv")
DELIMITERS = ",;\t"
TEXT = ".txt"


def read_values(path: str | Path) -> Values:
    """Yield (line from 1, value) for every record of a file, and a problem for everything that cannot be read.

    Parquet, CSV, TSV and text files are told by the end of their name, JSON lines and JSON arrays by their content.
    A row of a table is an object with a field for each column, a line of a text file an object with the field `text`.
    """
    if is_hub_dataset(path):
        yield from read_hub_values(path)
        return
    problem = file_problem(path)
    if problem is not None:
        yield problem
        return
    suffix = Path(path).suffix.lower()
    if suffix == PARQUET:
        yield from read_parquet_values(path)
    elif suffix in TABLES:
        yield from _read_table(path)
    elif suffix == TEXT and not _begins_with_json(path):
        yield from _read_documents(path)
    else:
        yield from read_json_values(path)


def parse_values(path: str | Path, parse: Callable[[int, object], T]) -> Iterator[T | RecordProblem]:
    """Yield what `parse` makes of each (line, value) of a file, and a problem where it raises MalformedError."""
    for item in read_values(path):
        if isinstance(item, RecordProblem):
            yield item
            continue
        try:
            parsed: T | RecordProblem = parse(*item)
        except MalformedError as error:
            parsed = RecordProblem(str(path), item[0], error.field, error.expected, error.got, error.effect)
        yield parsed


def file_problem(path: str | Path) -> RecordProblem | None:
    """Return why a path cannot be read as a data file: it is missing, a folder, a pipe or a device; None if it can be.

    Nothing is opened: opening a pipe would wait for its writer, and a device may never end.
    """
    name = str(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        where = f"Paths are relative to the current folder: {Path.cwd()}"
        return RecordProblem(name, 0, "file", "a file that exists", f"no such file. {where}")
    except (OSError, ValueError) as error:
        return RecordProblem(name, 0, "file", "a readable file", getattr(error, "strerror", None) or str(error))
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return RecordProblem(name, 0, "file", "a file", "a folder: name the files in it, separated by commas")
    what = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
    return RecordProblem(
        name, 0, "file", "a file, because data is read several times", f"{what}: write it to a file first"
    )


def _begins_with_json(path: str | Path) -> bool:
    """Return whether a text file's first line is a JSON object, or begins an array of objects."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        first = next((line for line in iter(lambda: file.readline(MAX_RECORD_BYTES), "") if line.strip()), "").strip()
    if first.startswith("["):
        return not first[1:].strip() or first[1:].lstrip().startswith("{")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_documents(path: str | Path) -> Values:
    """Yield every line that is not blank as a document, as the `text` loader of `datasets` does."""
    name, found = str(path), False
    with open(path, "rb") as file:
        head = file.read(MARK_LENGTH)
        problem = foreign_encoding(name, head)
        if problem is not None:
            yield problem
            return
        start = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
        file.seek(start)
        for item in decoded_lines(name, file, start):
            found = True
            yield item if isinstance(item, RecordProblem) else (item[0], {"text": item[1].rstrip("\r\n")})
    if not found:
        yield RecordProblem(name, 0, "file", "at least one record", "an empty file")


def _read_table(path: str | Path) -> Values:
    """Yield every row of a CSV or TSV file as an object of its columns that have a value.

    The first row names the columns. Its most frequent of comma, semicolon and tab separates them.
    """
    name = str(path)
    with open(path, "rb") as binary:
        problem = foreign_encoding(name, binary.read(MARK_LENGTH))
    if problem is not None:
        yield problem
        return
    csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = max(DELIMITERS, key=file.readline().count)
            file.seek(0)
            yield from _rows(name, csv.reader(file, delimiter=delimiter, strict=True))
    except UnicodeDecodeError:
        yield _first_encoding_problem(path)


def _rows(name: str, reader: Any) -> Values:
    columns: list[str] = next(reader, [])
    if len(set(columns)) < len(columns) or not all(columns):
        yield RecordProblem(name, 1, "columns", "a different name for each column", shorten(columns), Effect.STOP)
        return
    found = False
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield RecordProblem(name, line, "row", "cells in closed quotation marks", str(error))
            found = True
            continue
        found = True
        if not any(cells):
            continue
        if len(cells) != len(columns):
            yield RecordProblem(name, line, "row", f"{len(columns)} cells, as the first row has", f"{len(cells)}")
            continue
        yield line, {column: cell for column, cell in zip(columns, cells, strict=True) if cell}
    if not found:
        yield RecordProblem(name, 0, "file", "at least one record", "an empty file")


def _first_encoding_problem(path: str | Path) -> RecordProblem:
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as error:
                return replace(encoding_problem(str(path), number, raw, offset, error), effect=Effect.STOP)
            offset += len(raw)
    raise AssertionError("the file was not UTF-8 a moment ago")
