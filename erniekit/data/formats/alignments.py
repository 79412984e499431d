"""Read the times of words from files of forced aligners: TextGrid of Praat, CTM of NIST and Kaldi.

A TextGrid is read as Praat does: what counts are the free-standing numbers, quoted texts and flags, in this order, so
that the long and the short form are one. Every problem names the file and the line in it.
"""

from __future__ import annotations

import codecs
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, NoReturn

from erniekit.data.formats.problems import MalformedError, shorten
from erniekit.data.units import AlignedWord

SUFFIXES = (".textgrid", ".ctm")
WORD_TIER = "words"
MAX_BYTES = {".textgrid": 1 << 24, ".ctm": 1 << 26}  # a TextGrid of phones has about 1 MB an hour
MAX_OVERLAP_S = 1e-4  # what two times of one border differ by when they are written or added
EMPTY_WORD = "<eps>"  # of Kaldi: no word
_MAX_SHOWN_NAMES = 6
_TOKEN = re.compile(
    r'"(?P<text>(?:[^"]|"")*)"(?!")|(?P<open>")|![^\n]*'
    r"|(?<!\S)(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?!\S)|(?<!\S)(?P<flag><[^<>\s]*>)(?!\S)"
)


class Alignment(NamedTuple):
    """The words of a recording in order, without pauses, and its length in seconds; None where the file has none."""

    words: tuple[AlignedWord, ...]
    duration: float | None


def read_alignment(path: str, tier: str = "", recording: str = "") -> Alignment:
    """Read the words of a recording and their times.

    Args:
        path: of an existing file that ends in .TextGrid or .ctm.
        tier: of a TextGrid; "" for "words".
        recording: its name in a CTM file; "" for a file of one recording.

    Raises:
        MalformedError: the file cannot be read, has no such tier or recording, or no word, or words overlap or run
            backwards.
    """
    suffix = suffix_of(path)
    return _textgrid_words(path, tier or WORD_TIER) if suffix == ".textgrid" else _ctm_words(path, recording)


def suffix_of(path: str) -> str:
    """Return which of SUFFIXES a path has, "" if none."""
    return next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), "")


def check_order(words: list[AlignedWord], place: list[str], field: str) -> tuple[AlignedWord, ...]:
    """Return the words with text; one that begins a rounding error before the last one's end begins there.

    Args:
        place: where each word stands, for messages.

    Raises:
        MalformedError: a word ends before it begins, or begins before the one before it ends.
    """
    checked: list[AlignedWord] = []
    end = 0.0
    for word, where in zip(words, place, strict=True):
        if word.end < word.start:
            raise MalformedError(field, f"words that end after they begin ({where})", f"{word.start:g} to {word.end:g}")
        if word.start < end - MAX_OVERLAP_S:
            got = f"{shorten(word.text)} at {word.start:g} s, before {end:g} s"
            raise MalformedError(field, f"words in order that do not overlap ({where})", got)
        start, end = max(word.start, end), max(word.end, end)
        if word.text.strip():
            checked.append(AlignedWord(word.text.strip(), start, end))
    return tuple(checked)


class _Token(NamedTuple):
    line: int
    kind: str  # text, number or flag
    value: str


class _Tokens:
    """The tokens of a TextGrid, taken one after another."""

    def __init__(self, path: str) -> None:
        self.path, self.line = path, 1
        self._tokens = _tokens(path, _read_text(path))

    def text(self, what: str) -> str:
        return self._next("text", what).replace('""', '"')

    def number(self, what: str) -> float:
        value = float(self._next("number", what))
        return value if math.isfinite(value) else self.refuse(f"{what}, a finite number", "one too large")

    def count(self, what: str) -> int:
        value = self.number(what)
        return int(value) if value >= 0 and value == int(value) else self.refuse(f"the number of {what}", f"{value:g}")

    def flag(self) -> str:
        return self._next("flag", "<exists>")

    def refuse(self, expected: str, got: str) -> NoReturn:
        raise MalformedError("alignment", expected, f"{self.path}:{self.line}: {got}")

    def _next(self, kind: str, what: str) -> str:
        token = next(self._tokens, None)
        if token is None:
            self.refuse(what, "the end of the file (truncated?)")
        self.line = token.line
        if token.kind != kind:
            self.refuse(what, shorten(token.value))
        return token.value


def _tokens(path: str, text: str) -> Iterator[_Token]:
    line = 1
    position = 0
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if kind is None:  # a comment
            continue
        line += text.count("\n", position, found.start())
        position = found.start()
        if kind == "open":
            raise MalformedError("alignment", "texts in closed quotation marks", f"{path}:{line}: one without an end")
        yield _Token(line, kind, found.group(kind))


def _textgrid_words(path: str, tier: str) -> Alignment:
    tokens = _Tokens(path)
    if tokens.text('"ooTextFile", as Praat writes TextGrids as text') != "ooTextFile":
        tokens.refuse('"ooTextFile", as Praat writes TextGrids as text', "another kind of file")
    if tokens.text('"TextGrid"') != "TextGrid":
        tokens.refuse('"TextGrid"', "another kind of object")
    tokens.number("the beginning of the TextGrid")
    tokens.number("the end of the TextGrid")
    names: list[str] = []
    for _ in range(tokens.count("tiers") if tokens.flag() == "<exists>" else 0):
        kind = tokens.text("the class of a tier")
        if kind not in ("IntervalTier", "TextTier"):
            tokens.refuse("IntervalTier or TextTier", shorten(kind))
        names.append(tokens.text("the name of a tier"))
        tokens.number("the beginning of a tier")
        tokens.number("the end of a tier")
        size = tokens.count("intervals")
        if kind == "IntervalTier" and names[-1] == tier:
            return _intervals(tokens, size)
        for _ in range(size):
            tokens.number("a time")
            if kind == "IntervalTier":
                tokens.number("a time")
            tokens.text("the label of an interval")
    shown = ", ".join(map(shorten, names[:_MAX_SHOWN_NAMES])) or "no tier"
    expected = f"an interval tier {shorten(tier)} (`tier` names another)"
    raise MalformedError("alignment", expected, f"{path}: {shown}")


def _intervals(tokens: _Tokens, size: int) -> Alignment:
    words: list[AlignedWord] = []
    place: list[str] = []
    for _ in range(size):
        start = tokens.number("the beginning of an interval")
        place.append(f"{tokens.path}:{tokens.line}")
        end = tokens.number("the end of an interval")
        words.append(AlignedWord(tokens.text("the label of an interval"), start, end))
        if start < 0:
            tokens.refuse("times from 0 on", f"{start:g}")
    checked = check_order(words, place, "alignment")
    if not checked:
        raise MalformedError("alignment", "at least one word", f"{tokens.path}:{tokens.line}: an empty tier")
    return Alignment(checked, words[-1].end)


def _ctm_words(path: str, recording: str) -> Alignment:
    recordings = _read_ctm(path)
    if not recordings:
        raise MalformedError("alignment", "at least one word", f"{path}: none")
    if not recording and len(recordings) > 1:
        raise MalformedError("recording", f"which of the {len(recordings):,} recordings of {path}", "nothing")
    if recording and recording not in recordings:
        raise MalformedError("recording", f"a recording of {path}", shorten(recording))
    lines = recordings[recording] if recording else next(iter(recordings.values()))
    place = [f"{path}:{line}" for line, _ in lines]
    return Alignment(check_order([word for _, word in lines], place, "alignment"), None)


@lru_cache(maxsize=2)  # one file may hold the words of many records
def _read_ctm(path: str) -> dict[str, list[tuple[int, AlignedWord]]]:
    """Return the words of each recording of a file, with their lines."""
    recordings: dict[str, list[tuple[int, AlignedWord]]] = defaultdict(list)
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        fields = line.split()
        if not fields or line.startswith(";;"):
            continue
        if len(fields) not in (5, 6):
            expected = "lines of recording, channel, beginning, duration, word and perhaps a confidence"
            raise MalformedError("alignment", expected, f"{path}:{number}: {len(fields)} fields")
        try:
            start, duration = float(fields[2]), float(fields[3])
        except ValueError:
            start = duration = math.nan
        if not (0 <= start < math.inf and 0 <= duration < math.inf):
            got = f"{path}:{number}: {shorten(fields[2])} and {shorten(fields[3])}"
            raise MalformedError("alignment", "a beginning and a duration in seconds from 0", got)
        text = "" if fields[4] == EMPTY_WORD else fields[4]
        recordings[fields[0]].append((number, AlignedWord(text, start, start + duration)))
    return dict(recordings)


def _read_text(path: str) -> str:
    """Return the text of a file, in UTF-8 or, with a byte order mark, UTF-16."""
    limit = MAX_BYTES[suffix_of(path)]
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise MalformedError("alignment", "a readable file", f"{path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise MalformedError("alignment", f"a file of at most {limit >> 20} MiB", f"{path}: a larger one")
    wide = data.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        expected = "text in UTF-8 or UTF-16 (of Praat: saved as text, not as binary)"
        raise MalformedError("alignment", expected, f"{path}:{line}: other bytes") from None
