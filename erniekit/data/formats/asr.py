"""Parse records for speech recognition: a recording, or a stretch of one, and its transcript."""

from __future__ import annotations

import math
import re

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.formats.problems import MalformedError, describe_value, parse_answer, parse_text, shorten
from erniekit.data.formats.recordings import EXPECTED, parse_recording
from erniekit.data.media.clip import SOUND_SUFFIXES, Clip, ContentClip

# The names of the recording and of its transcript, the first of which counts that a record has.
OWN_RECORDING_FIELDS = ("audio_path", "audio_filepath", "audio", "wav")  # here; NeMo's manifests; datasets; WeNet
FILE_FIELDS = ("file_name", "file", "path")  # audiofolder's metadata; LibriSpeech; Common Voice: any file may be one
RECORDING_FIELDS = OWN_RECORDING_FIELDS + FILE_FIELDS
TEXT_FIELDS = ("text", "transcription", "sentence", "transcript", "normalized_text", "txt")
START_FIELDS = ("start", "offset")  # the second is NeMo's
LANGUAGE_FIELDS = ("language", "lang")
STRETCH_FIELDS = (*START_FIELDS, "end", "duration")
_DIALOGUE_FIELDS = ("messages", "conversations", "instruction", "prompt", "src")
_LANGUAGE = re.compile(r"[A-Za-z][\w -]{0,39}", re.ASCII)


def is_asr_record(record: dict) -> bool:
    """Return whether a record names a recording, and is no dialogue."""
    if any(record.get(name) is not None for name in _DIALOGUE_FIELDS):
        return False
    files = (record.get(name) for name in FILE_FIELDS)
    return any(isinstance(record.get(name), (str, dict, Clip)) for name in OWN_RECORDING_FIELDS) or any(
        isinstance(file, str) and file.lower().endswith(SOUND_SUFFIXES) for file in files
    )


def parse_asr(record: dict) -> Conversation:
    """Return the dialogue in which a user gives the recording, and the assistant answers with its transcript."""
    clip = parse_clip(record)
    text_name = _first(record, TEXT_FIELDS)
    if text_name is None:
        raise MalformedError(TEXT_FIELDS[0], "the transcript", "nothing")
    text = parse_answer(record[text_name], text_name)
    turns = (Turn(USER, "", clips=(ContentClip(0, clip),)), Turn(ASSISTANT, text, True))
    return Conversation(turns, transcribes=True, language=_language(record))


def parse_clip(record: dict) -> Clip:
    """Return the recording that a record names, or the stretch of one; the record need not have a transcript.

    Raises:
        MalformedError: it names none, or the stretch is none.
    """
    name = _first(record, RECORDING_FIELDS)
    if name is None:
        raise MalformedError(RECORDING_FIELDS[0], EXPECTED, "nothing")
    return _stretch(record, parse_recording(record[name], name))


def _first(record: dict, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _stretch(record: dict, clip: Clip) -> Clip:
    """Return the clip from `start` to `end`; with a start, NeMo's `duration` ends it, without one it is only declared.

    Raises:
        MalformedError: these are not numbers of seconds from 0, or the end is not after the start.
    """
    seconds = {name: parse_seconds(record[name], name) for name in STRETCH_FIELDS if record.get(name) is not None}
    starts = [name for name in START_FIELDS if name in seconds]
    if len(starts) > 1:
        raise MalformedError(starts[1], f"none beside `{starts[0]}`, which means the same", shorten(record[starts[1]]))
    start = seconds[starts[0]] if starts else 0.0
    duration, end = seconds.get("duration"), seconds.get("end")
    if end is None and starts and duration is not None:
        end = start + duration
    if duration == 0:
        raise MalformedError("duration", "seconds above 0", shorten(record["duration"]))
    if end is not None and not start < end < math.inf:
        raise MalformedError("end", f"seconds after the start ({start:g})", shorten(record.get("end", end)))
    return Clip(clip.path, start, end, clip.row, clip.column, duration)


def parse_seconds(value: object, name: str) -> float:
    """Return a number of seconds; a table has its text."""
    expected = "a number of seconds from 0"
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise MalformedError(name, expected, describe_value(value)) from None
    if not math.isfinite(number) or number < 0:
        raise MalformedError(name, expected, describe_value(value))
    return number


def _language(record: dict) -> str:
    name = _first(record, LANGUAGE_FIELDS)
    if name is None:
        return ""
    text = parse_text(record[name], name).strip()
    if text and not _LANGUAGE.fullmatch(text):
        raise MalformedError(name, "a language such as en or zh-CN", shorten(text))
    return text
