"""Decode the lines of a data file; recognise an encoding that is not UTF-8, and say how to convert it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from erniekit.data.formats.problems import Effect, RecordProblem

# How files begin that hold no UTF-8: the bytes, what it is, and the command that converts it.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32", "iconv -f UTF-32 -t UTF-8 {name} > new-file"),
    (codecs.BOM_UTF32_BE, "UTF-32", "iconv -f UTF-32 -t UTF-8 {name} > new-file"),
    (codecs.BOM_UTF16_LE, "UTF-16", "iconv -f UTF-16 -t UTF-8 {name} > new-file"),
    (codecs.BOM_UTF16_BE, "UTF-16", "iconv -f UTF-16 -t UTF-8 {name} > new-file"),
    (b"{\x00", "UTF-16", "iconv -f UTF-16LE -t UTF-8 {name} > new-file"),
    (b"[\x00", "UTF-16", "iconv -f UTF-16LE -t UTF-8 {name} > new-file"),
    (b"\x00{", "UTF-16", "iconv -f UTF-16BE -t UTF-8 {name} > new-file"),
    (b"\x00[", "UTF-16", "iconv -f UTF-16BE -t UTF-8 {name} > new-file"),
    (b"\x1f\x8b", "gzip", "gunzip {name}"),
    (b"PK\x03\x04", "zip", "unzip {name}"),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "zstd -d {name}"),
    (b"\xfd7zXZ", "xz", "unxz {name}"),
    (b"PAR1", "Parquet", "mv {name} {name}.parquet"),
)
MAX_RECORD_BYTES = 1 << 26  # 64 MiB: more text than any sequence holds; a longer line is no record
MARK_LENGTH = 6  # bytes from the start of a file that `foreign_encoding` wants
# GBK writes nearly every Chinese character in two bytes above 127; Latin letters that decode as Chinese have one.
_MIN_BYTES_PER_CHINESE = 1.8


def foreign_encoding(name: str, head: bytes) -> RecordProblem | None:
    """Return the problem of a file that is not UTF-8, judged by its first bytes; None if it may be."""
    for mark, what, command in _MARKS:
        if head.startswith(mark):
            return _convert(name, 0, what, command)
    return None


def decoded_lines(name: str, file: BinaryIO, offset: int) -> Iterator[tuple[int, str] | RecordProblem]:
    """Yield (line from 1, text) for every line that is not blank, with its line end, and a problem for what is no text.

    Args:
        file: opened at byte `offset`, behind a byte order mark.
    """
    for number, raw in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES), b""), start=1):
        if len(raw) == MAX_RECORD_BYTES and not raw.endswith(b"\n"):
            got = "a longer one: is it a data file?"
            yield RecordProblem(name, number, "line", f"at most {MAX_RECORD_BYTES >> 20} MiB", got, Effect.STOP)
            return
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = encoding_problem(name, number, raw, offset, error)
            yield problem
            if problem.effect is Effect.STOP:
                return
        else:
            if text.strip():
                yield number, text
        offset += len(raw)


def encoding_problem(name: str, line: int, raw: bytes, offset: int, error: UnicodeDecodeError) -> RecordProblem:
    """Return the problem of bytes that are not UTF-8; it stops the run if the whole file is Chinese text in GBK.

    Args:
        raw: the bytes that did not decode, which begin at byte `offset` of the file.
    """
    if _is_gbk(raw):
        return _convert(name, line, "GBK (Chinese)", "iconv -f GB18030 -t UTF-8 {name} > new-file")
    byte = raw[error.start]
    got = f"byte 0x{byte:02x} at byte offset {offset + error.start:,}"
    return RecordProblem(name, line, "encoding", "UTF-8", got)


def _convert(name: str, line: int, what: str, command: str) -> RecordProblem:
    return RecordProblem(
        name, line, "encoding", "UTF-8", f"{what}: convert it with `{command.format(name=name)}`", Effect.STOP
    )


def _is_gbk(raw: bytes) -> bool:
    try:
        text = raw.decode("gb18030")
    except UnicodeDecodeError:
        return False
    above = sum(byte > 127 for byte in raw)
    chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return chinese > 0 and above >= _MIN_BYTES_PER_CHINESE * chinese
