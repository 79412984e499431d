"""Read recordings: how long one is, and its sound at the rate that a model wants.

libsndfile (`soundfile`) decodes, soxr changes the rate. A recording is opened, read and closed, by any number of
threads; nothing of it stays in memory.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from mmap import ACCESS_READ, mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from erniekit.data.media import mpeg, stored_bytes
from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import INSTALL, RecordingError, describe_clip
from erniekit.errors import DataError

if TYPE_CHECKING:
    from soundfile import SoundFile

BLOCK_VALUES = 1 << 16  # samples of all channels that are decoded at once; they stay in the cache of a core
MIN_RATE, MAX_RATE = 1000, 1_536_000  # samples a second
MAX_SECONDS = 24 * 3600
MAX_AMPLITUDE = 256.0  # full scale is 1; integers that were not divided by their scale are far above
END_TOLERANCE = 0.1  # seconds by which `end` may lie behind the end of the file: lists of segments round their times
MP3_MISSING = 2 * 1152  # frames that a decoder of MP3 may leave out at the edges, where it lacks what was before
VORBIS_END = 30  # seconds before the end of an Ogg file, in whose last page a seek is a few samples off
_UNKNOWN_SIZE = 0x7FFF_0000  # programs that write into a pipe put such a size, or a larger one, into a WAV's header
_SLOPPY = 64  # bytes by which headers are wrong that count themselves, too
_CUT = re.compile(r"^\s*(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)  # what libsndfile notes of WAV, AIFF
_CONVERT = "ffmpeg -i OLD -ac 1 -ar 16000 NEW.flac"


class Stretch(NamedTuple):
    """What a clip names of a recording, in frames of the file (one sample of each channel)."""

    first: int
    frames: int
    rate: int
    format: str = ""  # of the file, as libsndfile calls it


def clip_length(clip: Clip, sampling_rate: int = 16_000) -> int:
    """Return the number of samples that `read_clip` gives, found in the header of the file: nothing is decoded.

    A clip of n frames with f frames a second gives ceil(n sampling_rate / f) samples. The headers of all MPEG
    frames are read, too, because an MP3 file need not say how long it is.

    Raises:
        RecordingError: the recording is missing, unreadable, empty, cut off, or does not reach to the clip.
        DataError: a package is missing.
    """
    with _opened(clip) as file:
        stretch = _stretch(clip, file)
        if stretch.rate != sampling_rate:
            _resampler(stretch)  # told before a run, and not when it reads the first such recording
        return _resampled(stretch, sampling_rate)


def read_clip(clip: Clip, sampling_rate: int = 16_000) -> np.ndarray:
    """Decode a clip.

    Args:
        sampling_rate: samples a second of the result, whatever the rate of the file is.

    Returns:
        float32[clip_length(clip, sampling_rate)], the mean of all channels; full scale is -1 to 1.

    Raises:
        RecordingError: as `clip_length`, or what is there cannot be decoded, is less than the header says, or holds NaN
            or values that are no sound.
        DataError: a package is missing.
    """
    with decoding(clip) as (stretch, blocks):
        sound = _resample((_mean_channel(block) for block in blocks), stretch, sampling_rate)
    peak = float(np.abs(sound).max())
    if not peak <= MAX_AMPLITUDE:
        got = "NaN or infinity" if not math.isfinite(peak) else f"{peak:,.0f}"
        raise RecordingError(clip, "samples from -1 to 1", f"{got}: were integers stored as floats without scaling?")
    return sound


@contextmanager
def decoding(clip: Clip) -> Iterator[tuple[Stretch, Iterator[np.ndarray]]]:
    """Open a clip to decode it: which frames of the file it is, and their blocks, float32[n, channels].

    Raises:
        RecordingError: as `read_clip`, also while the blocks are read; their values are not looked at.
    """
    with _opened(clip) as file:
        stretch = _stretch(clip, file)
        try:
            _seek(file, stretch.first)
            yield stretch, _blocks(clip, file, stretch.frames)
        except _decoding_errors() as error:
            raise RecordingError(clip, "a whole recording", f"a damaged or cut off one ({_reason(error)})") from None


def _resampled(stretch: Stretch, sampling_rate: int) -> int:
    return -(-stretch.frames * sampling_rate // stretch.rate)


@contextmanager
def _opened(clip: Clip) -> Iterator[SoundFile]:
    """Open a recording; the errors of opening become messages, those of the caller's reading pass."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: the wheel of this platform has no libsndfile
        raise DataError(f"{describe_clip(clip)}: to read recordings, install soundfile ({INSTALL}): {error}") from None
    try:
        source = recording_source(clip)
        file = soundfile.SoundFile(source)
    except (_decoding_errors(), TypeError) as error:  # TypeError: a name that ends with .raw has no header for it
        expected = "a recording in a format that libsndfile reads, such as wav, flac, mp3 or ogg"
        raise RecordingError(clip, expected, f"another file ({_reason(error)}): convert it, `{_CONVERT}`") from None
    except OSError as error:
        raise RecordingError(clip, "a readable file", error.strerror or str(error)) from None
    with file:
        if file.format == "MP3":
            _check_mpeg(clip, file, source)
        yield file


def recording_source(clip: Clip) -> str | BytesIO:
    """Return what libsndfile opens: the path, or the bytes of a Parquet or Arrow file's row.

    Raises:
        RecordingError: there is no such file or row, it may not be read, or it is empty.
    """
    if clip.row >= 0:
        return BytesIO(stored_bytes.read_bytes(clip))
    try:
        mode = os.stat(clip.path).st_mode
    except FileNotFoundError:
        raise RecordingError(clip, "a recording", "no such file") from None
    except ValueError as error:  # a NUL in the name
        raise RecordingError(clip, "a recording", str(error)) from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, device or socket"
        raise RecordingError(clip, "a recording", what)
    if not os.access(clip.path, os.R_OK):
        raise RecordingError(clip, "a readable file", "no permission to read it")
    if not os.path.getsize(clip.path):
        raise RecordingError(clip, "a recording", "an empty file")
    return clip.path


def _decoding_errors() -> type[Exception]:
    from soundfile import SoundFileError

    error: type[Exception] = SoundFileError
    return error


def _reason(error: Exception) -> str:
    own = getattr(error, "error_string", None)
    return str(own or error).removeprefix("Error : ").strip().rstrip(".")


def _stretch(clip: Clip, file: Any) -> Stretch:
    """Return which frames of the file the clip names.

    Raises:
        RecordingError: there are none, or the header of the file is not to be trusted.
    """
    frames, rate = file.frames, file.samplerate
    if not MIN_RATE <= rate <= MAX_RATE:
        raise RecordingError(clip, f"{MIN_RATE:,} to {MAX_RATE:,} samples a second", f"{rate:,}")
    if frames >= 1 << 62:  # FLAC that was written into a pipe
        raise RecordingError(clip, "a header that says how long the recording is", f"none: rewrite it, `{_CONVERT}`")
    if not frames:
        raise RecordingError(clip, "at least one sample", "an empty recording")
    cut = _CUT.search(file.extra_info)
    if cut is not None and int(cut[2]) + _SLOPPY < int(cut[1]) < _UNKNOWN_SIZE:
        got = f"{int(cut[2]):,}: the file is cut off"
        raise RecordingError(clip, f"{int(cut[1]):,} bytes of sound, as the header says", got)
    seconds = frames / rate
    if not 0 <= clip.start < seconds:
        raise RecordingError(clip, f"a start within the recording of {seconds:.3f} s", f"{clip.start:g} s")
    if clip.end is not None and not clip.start < clip.end <= seconds + END_TOLERANCE:
        expected = f"an end behind the start and within the recording of {seconds:.3f} s"
        raise RecordingError(clip, expected, f"{clip.end:g} s")
    first = min(round(clip.start * rate), frames - 1)
    last = frames if clip.end is None else min(round(clip.end * rate), frames)
    if last <= first:
        raise RecordingError(clip, "at least one sample", "a clip that is shorter")
    if last - first > MAX_SECONDS * rate:
        expected = f"at most {MAX_SECONDS // 3600} hours (name a `start` and an `end`)"
        raise RecordingError(clip, expected, f"{(last - first) / rate / 3600:,.0f} hours")
    return Stretch(first, last - first, rate, file.format)


def _check_mpeg(clip: Clip, file: Any, source: str | BytesIO) -> None:
    """Compare the length that libsndfile takes from an MP3 file's first frame, or guesses, with its frames."""
    if isinstance(source, BytesIO):
        found = mpeg.sample_count(source.getvalue())
    else:
        status = os.stat(source)
        found = _mpeg_samples(source, status.st_size, status.st_mtime_ns)
    if found is not None and abs(found - file.frames) > mpeg.MAX_TRIMMED:
        header, real = file.frames / file.samplerate, found / file.samplerate
        got = f"{real:.2f} s of sound: if the file is not cut off, `ffmpeg -i OLD.mp3 -c copy NEW.mp3` mends its header"
        raise RecordingError(clip, f"{header:.2f} s, as the first frame says or its bit rate lets expect", got)


@lru_cache(maxsize=1024)  # clips of one recording follow each other
def _mpeg_samples(path: str, size: int, changed: int) -> int | None:
    """Return the samples of an MP3 file; `size` and `changed` tell its states apart."""
    with open(path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:  # hours of sound may be large
        return mpeg.sample_count(content)


def _seek(file: Any, frame: int) -> None:
    """Go to a frame, exactly. Where libsndfile only comes near, what is before the frame is decoded and left out."""
    start = frame
    if file.format == "MP3":
        start = 0
    elif file.subtype == "VORBIS":
        start = min(frame, max(0, file.frames - VORBIS_END * file.samplerate))
    file.seek(start)
    while start < frame:
        skipped = len(file.read(min(frame - start, _block_frames(file)), dtype="float32", always_2d=True))
        if not skipped:
            return
        start += skipped


def _block_frames(file: Any) -> int:
    return max(1, BLOCK_VALUES // file.channels)


def _blocks(clip: Clip, file: Any, frames: int) -> Iterator[np.ndarray]:
    """Yield the next `frames` frames in blocks, float32[n, channels].

    Raises:
        RecordingError: there are fewer.
    """
    left = frames
    while left > 0:
        block = file.read(min(left, _block_frames(file)), dtype="float32", always_2d=True)
        if not len(block):
            break
        left -= len(block)
        yield block
    if left > (MP3_MISSING if file.format == "MP3" else 0):
        got = f"{(frames - left) / file.samplerate:.3f} s: the file is cut off or damaged"
        raise RecordingError(clip, f"{frames / file.samplerate:.3f} s of sound, as the header says", got)
    if left:
        yield np.zeros((left, 1), np.float32)


def _mean_channel(block: np.ndarray) -> np.ndarray:
    """Return the mean of the channels of float32[n, channels]."""
    channels = block.shape[1]
    return block[:, 0] if channels == 1 else np.einsum("nc->n", block) / np.float32(channels)  # faster than `mean`


def _resampler(stretch: Stretch) -> Any:
    """Return the library that changes the rate.

    Raises:
        DataError: it is missing.
    """
    try:
        import soxr
    except ImportError:
        needed = f"recordings of {stretch.rate} samples a second: to resample them, install soxr ({INSTALL})"
        raise DataError(needed) from None
    return soxr


def _resample(blocks: Iterator[np.ndarray], stretch: Stretch, sampling_rate: int) -> np.ndarray:
    """Join the blocks at the wanted rate. What the filter needs behind the end is silence."""
    if stretch.rate == sampling_rate:
        return np.concatenate(list(blocks))
    stream = _resampler(stretch).ResampleStream(stretch.rate, sampling_rate, 1, dtype="float32")
    parts = [stream.resample_chunk(block) for block in blocks]
    parts.append(stream.resample_chunk(np.zeros(2 + 2 * stretch.rate // sampling_rate, np.float32), last=True))
    return np.concatenate(parts)[: _resampled(stretch, sampling_rate)]
