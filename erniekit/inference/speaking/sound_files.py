"""Where spoken sound goes: a file for each text, files of its pieces, or a stream that is heard while it grows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from glob import escape
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from erniekit.data.media.code_shards import write_whole
from erniekit.data.media.errors import INSTALL
from erniekit.errors import DataError
from erniekit.inference.speaking import Piece

FORMATS = ("wav", "flac", "raw")
UNKNOWN_LENGTH = 0xFFFFFFFF  # bytes, in the header of a WAV file that is written while it is made


class Target(Protocol):
    """Takes the pieces of sound as they come, those of each text in order."""

    def add(self, piece: Piece) -> Path | None:
        """Take a piece; return the file that is complete with it."""
        ...


class SoundFiles:
    """Writes a file for each text, when its last piece is there.

    Args:
        targets: the file of each text; nothing is overwritten.
    """

    def __init__(self, targets: Sequence[Path], sampling_rate: int, form: str) -> None:
        self._targets, self._rate, self._form = targets, sampling_rate, form
        self._parts: dict[int, list[np.ndarray]] = {}

    def add(self, piece: Piece) -> Path | None:
        parts = self._parts.setdefault(piece.utterance, [])
        parts.append(piece.sound)
        if not piece.last:
            return None
        target = self._targets[piece.utterance]
        write_sound(target, np.concatenate(self._parts.pop(piece.utterance)), self._rate, self._form)
        return target


class PieceFiles:
    """Writes a file for each piece, NAME-01.wav and so on, as soon as it is there."""

    def __init__(self, targets: Sequence[Path], sampling_rate: int, form: str) -> None:
        self._targets, self._rate, self._form = targets, sampling_rate, form

    def add(self, piece: Piece) -> Path | None:
        whole = self._targets[piece.utterance]
        target = whole.with_name(f"{whole.stem}-{piece.number + 1:02d}{whole.suffix}")
        write_sound(target, piece.sound, self._rate, self._form)
        return target


class SoundStream:
    """Writes all texts one after the other into a stream: 16-bit samples, behind the header of a WAV file that says
    nothing of its length. What belongs to a later text waits for the end of those before it."""

    def __init__(self, stream: BinaryIO, sampling_rate: int, form: str) -> None:
        if form == "flac":
            raise DataError("--output -: a stream is wav or raw; FLAC has its length in front")
        self._stream, self._next = stream, 0
        self._waiting: dict[int, list[Piece]] = {}
        if form == "wav":
            self._send(wav_header(sampling_rate))

    def add(self, piece: Piece) -> Path | None:
        self._waiting.setdefault(piece.utterance, []).append(piece)
        while pieces := self._waiting.pop(self._next, None):
            for own in pieces:
                self._send(samples_of(own.sound))
            if not pieces[-1].last:
                break
            self._next += 1
        return None

    def _send(self, content: bytes) -> None:
        self._stream.write(content)
        self._stream.flush()


def write_sound(target: Path, sound: np.ndarray, sampling_rate: int, form: str = "wav") -> None:
    """Write float32 [samples] of one channel as 16-bit samples into a file, complete or not at all.

    Raises:
        DataError: soundfile is missing, or the file cannot be written.
    """
    content = sound_bytes(sound, sampling_rate, form)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from None


def sound_bytes(sound: np.ndarray, sampling_rate: int, form: str) -> bytes | memoryview:
    """Return the bytes of a file of float32 [samples] of one channel, as 16-bit samples.

    Raises:
        DataError: soundfile is missing.
    """
    if form == "raw":
        return samples_of(sound)
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise DataError(f"to write sound, install soundfile ({INSTALL}): {error}") from None
    content = BytesIO()
    samples = np.frombuffer(samples_of(sound), "<i2")
    soundfile.write(content, samples, sampling_rate, subtype="PCM_16", format=form.upper())
    return content.getbuffer()


def samples_of(sound: np.ndarray) -> bytes:
    """Return sound as 16-bit samples, little-endian."""
    return np.rint(np.clip(sound, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()


def wav_header(sampling_rate: int) -> bytes:
    """Return the header of a WAV file of 16-bit samples in one channel, whose length is not known yet."""
    form = struct.pack("<HHIIHH", 1, 1, sampling_rate, 2 * sampling_rate, 2, 16)
    riff = b"RIFF" + struct.pack("<I", UNKNOWN_LENGTH) + b"WAVE"
    return riff + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", UNKNOWN_LENGTH)


def file_targets(output: Path, names: Sequence[str], form: str, *, pieces: bool = False) -> list[Path]:
    """Return the file of each text: `output` itself if it is named as a file of the format, else one in this folder.

    Args:
        names: of the texts, without suffix.
        pieces: there are several files of each text, which begin with its name.

    Raises:
        DataError: one file cannot hold several texts, or a file is there already.
    """
    suffix = f".{form}"
    if output.suffix.lower() == suffix and not output.is_dir():
        if len(names) > 1:
            raise DataError(f"--output {output}: is one file, and there are {len(names):,} texts; name a folder")
        targets = [output]
    elif output.suffix.lower().lstrip(".") in FORMATS and not output.is_dir():
        raise DataError(f"--output {output}: the format is {form}; write --format {output.suffix[1:].lower()}")
    elif output.exists() and not output.is_dir():
        raise DataError(f"--output {output}: is not a folder; a file of sound ends with {suffix}")
    else:
        targets = [output / f"{name}{suffix}" for name in names]
    names_of = dict[Path, int]()
    for number, target in enumerate(targets, start=1):
        if (other := names_of.setdefault(target, number)) != number:
            raise DataError(f"--output: {target} would be the file of text {other} and of text {number}; change an id")
        pattern = f"{escape(target.stem)}-[0-9][0-9]*{suffix}"
        there = next(iter(sorted(target.parent.glob(pattern))), None) if pieces else target
        if there is not None and there.exists():
            raise DataError(f"--output: {there} is there already and is never overwritten; name another one")
    return targets
