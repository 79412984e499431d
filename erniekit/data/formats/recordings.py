"""Read the recordings that a record names: values of its fields, parts of a content, and `<audio>` marks in a text.

A clip has its path as the record writes it, until `media_paths` finds the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import unquote, urlsplit

from erniekit.data.conversation import USER, Conversation, PlainText, Preference, Turn
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import MalformedError, describe_value, parse_text, shorten
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.data.units import AlignedUnits, SpokenText, TokenIds

AUDIO_LISTS = ("audios", "audio")  # fields of a dialogue or pair: the recordings that its marks stand for
AUDIO_MARK = "<audio>"
AUDIO_PARTS = ("audio", "audio_url", "input_audio")  # the types of a content part that holds a recording
EXPECTED = "the path of a sound file"
_SOURCES = ("audio", "path", "audio_url", "url", "input_audio", "value")  # fields of such a part, or of an object in it
_SOUNDS = ("data", "base64", "bytes", "array")  # fields that hold the sound itself
_NEXT = Clip("")  # of a part that names no recording: it is the next of `audios`
_LONGEST_PATH = 4096  # bytes, of Linux
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SCHEME = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]*://")
_WRITE_FILE = "write it to a file, and its path here"


def parse_recording(value: object, name: str) -> Clip:
    """Return the clip that a value names: a path, or an object with one, such as a row of a `datasets` column.

    Raises:
        MalformedError: it is neither; it is an address, or the sound itself.
    """
    if isinstance(value, Clip):  # its bytes are in the data file
        return value
    if isinstance(value, str):
        return Clip(_parse_path(value, name))
    if not isinstance(value, dict):
        raise MalformedError(name, EXPECTED, describe_value(value))
    if held := next((key for key in _SOUNDS if value.get(key) is not None), None):
        raise MalformedError(name, EXPECTED, f"the sound itself in `{held}`: {_WRITE_FILE}")
    key = next((key for key in _SOURCES if value.get(key) is not None), None)
    if key is None:
        raise MalformedError(name, EXPECTED, shorten(value))
    return parse_recording(value[key], f"{name}.{key}")


def _parse_path(value: str, name: str) -> str:
    path = parse_text(value, name)
    if path.startswith("file:///"):
        path = unquote(urlsplit(path).path)
    if not path.strip():
        raise MalformedError(name, EXPECTED, "an empty string")
    if scheme := _SCHEME.match(path):
        what = "the sound itself" if scheme.group() == "data:" else "an address, from which nothing is downloaded"
        raise MalformedError(name, EXPECTED, f"{shorten(path)} ({what}): {_WRITE_FILE}")
    if _CONTROL.search(path):
        raise MalformedError(name, EXPECTED, f"{shorten(path)}, which has a control character")
    if len(path.encode()) > _LONGEST_PATH:
        raise MalformedError(name, EXPECTED, f"{shorten(path)}, which is too long for one")
    return path


def parse_audio_part(part: dict, name: str) -> Clip:
    """Return the recording of a content part; one that names none is the next of `audios`."""
    named = any(part.get(key) is not None for key in (*_SOURCES, *_SOUNDS))
    return parse_recording(part, name) if named else _NEXT


def with_recordings(record: dict, parsed: Record) -> Record:
    """Return a parsed record with the recordings of its field `audios`, each where a mark of it stands.

    With that field, every `<audio>` in a user's text is a mark, and so is every content part of type audio that names
    no recording. Without it the word `<audio>` is text.

    Raises:
        MalformedError: the marks are not as many as the recordings, or a recording stands elsewhere than in a user's
            text of a dialogue or of a pair's prompt.
    """
    if isinstance(parsed, (AlignedUnits, SpokenText)):
        return parsed
    name = next((name for name in AUDIO_LISTS if record.get(name) is not None), None)
    if isinstance(parsed, (PlainText, TokenIds)):
        if name is not None:
            raise MalformedError(
                name,
                "plain text" if isinstance(parsed, PlainText) else "token ids",
                "a recording, which only dialogues can have (stage SFT)",
            )
        return parsed
    if isinstance(parsed, Preference):
        answers = (*parsed.chosen, *parsed.rejected)
        return replace(parsed, prompt=_with_marked(record, name, parsed.prompt, answers))
    return parsed if parsed.transcribes else _with_marked(record, name, parsed)


def _with_marked(record: dict, name: str | None, dialogue: Conversation, answers: Sequence[Turn] = ()) -> Conversation:
    if any(turn.clips for turn in answers):
        raise MalformedError("chosen", "recordings in the prompt of a pair only", "one in an answer")
    if any(not part.trained for turn in answers for part in turn.units_and_texts):
        raise MalformedError("chosen", "answers of a pair without `train`, which are trained as a whole", "some")
    if name is None and not any(found.clip == _NEXT for turn in dialogue.turns for found in turn.clips):
        return dialogue
    field = name or AUDIO_LISTS[0]
    values = record.get(field, [])
    clips = [
        parse_recording(value, f"{field}[{number}]" if isinstance(values, list) else field)
        for number, value in enumerate(values if isinstance(values, list) else [values])
    ]
    others = [turn.content for turn in dialogue.turns if turn.role != USER] + [turn.content for turn in answers]
    if name is not None and any(AUDIO_MARK in text for text in (dialogue.system, *others)):
        expected = f"{AUDIO_MARK} in a user's text only, because `{name}` makes it the mark of a recording"
        raise MalformedError(name, expected, "one in another text")
    marks = [_marks(turn, in_text=name is not None) if turn.role == USER else [] for turn in dialogue.turns]
    count = sum(clip == _NEXT for found in marks for _, _, clip in found)
    if count != len(clips):
        expected = f"as many recordings as {AUDIO_MARK} marks or parts without a path ({count:,})"
        raise MalformedError(field, expected, f"{len(clips):,}")
    rest = iter(clips)
    turns = [_with_clips(turn, found, rest) for turn, found in zip(dialogue.turns, marks, strict=True)]
    return replace(dialogue, turns=tuple(turns))


def _marks(turn: Turn, *, in_text: bool) -> list[tuple[int, int, Clip]]:
    """Return (start, end, clip) of everything in a content that stands for a recording, in their order."""
    parts = [(offset, offset, clip) for offset, clip in turn.clips]
    words = [(*found.span(), _NEXT) for found in re.finditer(AUDIO_MARK, turn.content)] if in_text else []
    return sorted(parts + words, key=lambda mark: mark[0])  # a part that ends where a word begins stands before it


def _with_clips(turn: Turn, marks: Sequence[tuple[int, int, Clip]], rest: Iterator[Clip]) -> Turn:
    """Return a turn without its marks, and with the next of `rest` for each that names no recording."""
    if not marks:
        return turn
    text, last, clips = "", 0, []
    for start, end, clip in marks:
        text += turn.content[last:start]
        clips.append(ContentClip(len(text), next(rest) if clip == _NEXT else clip))
        last = max(last, end)
    return replace(turn, content=text + turn.content[last:], clips=tuple(clips))
