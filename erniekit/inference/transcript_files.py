"""Which recordings are transcribed, where their transcripts go, and what these files hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from erniekit.data.media.clip import SOUND_SUFFIXES
from erniekit.errors import DataError

if TYPE_CHECKING:  # the words of a command need no model
    from erniekit.inference.transcribe import Transcript

SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}
LIST_SUFFIXES = (".jsonl", ".csv", ".tsv")  # of files with many records, which are not written


class Job(NamedTuple):
    """A recording, and the file of its transcript; None: standard output."""

    recording: Path
    target: Path | None


def plan(names: Sequence[Path], output: Path | None, form: str) -> list[Job]:
    """Return what is to be transcribed: files as they are named, and the recordings in named folders and their
    subfolders, whose transcripts get the same subfolders in `output`.

    Args:
        output: a folder; or a file, if it has the suffix of a format and is no folder; None: standard output.

    Raises:
        DataError: there is no recording, two would have one transcript, or `output` cannot take them.
    """
    found = [item for name in names for item in _recordings(name)]
    found = list({recording.absolute(): (recording, inner) for recording, inner in found}.values())
    if not found:
        raise DataError(f"{', '.join(map(str, names))}: no recording; their names end with one of {_known()}")
    if output is None:
        return [Job(recording, None) for recording, _ in found]
    if output.suffix.lower() in SUFFIXES.values() and not output.is_dir():
        if len(found) > 1:
            raise DataError(f"--output {output}: is one file, and there are {len(found):,} recordings; name a folder")
        if output.exists():
            raise DataError(f"--output {output}: already exists and is never overwritten; name another file")
        return [Job(found[0][0], output)]
    listed = output.suffix.lower() in (*LIST_SUFFIXES, *SOUND_SUFFIXES) and not output.exists()
    if listed or (output.exists() and not output.is_dir()):
        raise DataError(
            f"--output {output}: is not a folder; a file of one transcript ends with {', '.join(SUFFIXES.values())}"
        )
    owners: dict[Path, Path] = {}
    for recording, inner in found:
        target = (output / inner).with_suffix(SUFFIXES[form])
        if target in owners:
            raise DataError(
                f"{owners[target]} and {recording}: both transcripts would be {target}; transcribe one of them into "
                "another folder"
            )
        owners[target] = recording
    return [Job(recording, target) for target, recording in owners.items()]


def _recordings(name: Path) -> list[tuple[Path, Path]]:
    """Return the recordings of a file or folder, each with its path below that folder."""
    if not name.is_dir():
        return [(name, Path(name.name))]  # reading it tells what is wrong with it
    files = sorted(path for path in name.rglob("*") if path.suffix.lower() in SOUND_SUFFIXES and not path.is_dir())
    return [(path, path.relative_to(name)) for path in files]


def _known() -> str:
    return ", ".join(sorted(SOUND_SUFFIXES))


def write_transcript(text: str, target: Path) -> None:
    """Write a file, which gets its name when it is complete.

    Raises:
        DataError: it cannot be written, or exists.
    """
    temp_path = target.with_name(f".writing-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise DataError(f"{target}: already exists and is never overwritten")
        temp_path.write_text(text, encoding="utf-8")
        temp_path.rename(target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):  # it is there only if something went wrong
            temp_path.unlink()


def content(transcript: Transcript, form: str, language: str = "") -> str:
    """Return a transcript as a file of this format has it. Times are those of its chunks.

    - `text`: the whole in one line.
    - `json`: `file`, `seconds`, `language` (of the request; null where the model was left to detect it),
      `text`, `chunks` (`start`, `end`, `text`, and `cut` where the model did not end), `real_time_factor` (seconds of
      computing for each second of sound: 0.1 is ten times as fast as listening).
    - `srt`, `vtt`: subtitles, one for each chunk in which something is said.
    """
    if form == "text":
        return " ".join(transcript.text.split()) + "\n"
    if form == "json":
        return json.dumps(_record(transcript, language), ensure_ascii=False, indent=2) + "\n"
    spoken = [piece for piece in transcript.pieces if piece.text.strip()]
    if form == "srt":
        cues = [
            f"{number}\n{_time(piece.start, ',')} --> {_time(piece.end, ',')}\n{_line(piece.text)}\n"
            for number, piece in enumerate(spoken, start=1)
        ]
        return "\n".join(cues)
    cues = [
        f"\n{_time(piece.start, '.')} --> {_time(piece.end, '.')}\n{_escaped(_line(piece.text))}\n" for piece in spoken
    ]
    return "WEBVTT\n" + "".join(cues)


def _record(transcript: Transcript, language: str) -> dict[str, object]:
    return {
        "file": str(transcript.path),
        "seconds": round(transcript.seconds, 3),
        "language": language or None,
        "text": transcript.text,
        "chunks": [
            {"start": round(piece.start, 3), "end": round(piece.end, 3), "text": piece.text.strip()}
            | ({"cut": True} if piece.cut else {})
            for piece in transcript.pieces
        ],
        "real_time_factor": round(transcript.compute_seconds / transcript.seconds, 4),
    }


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02d}:{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def _line(text: str) -> str:
    """Return a text in one line, without the arrow that separates times."""
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
