"""Find recordings that can be read, but hardly hold what their record says: silent, overloaded, broken off."""

from __future__ import annotations

import os
from io import BytesIO

import numpy as np

from erniekit.data.media.clip import Clip
from erniekit.data.media.errors import RecordingError
from erniekit.data.media.recording import Stretch, decoding, read_clip, recording_source

SILENCE = 1e-4  # the loudest sample of a silent recording: -80 dB of full scale
FULL_SCALE = 0.9999
MAX_OVERLOADED = 0.01  # of the samples; of a sine that just reaches full scale 0.9% do
MAX_SKIPPED = 300  # seconds of an MP3 file that are decoded before a clip
DURATION_TOLERANCE = 0.1  # seconds, and
DURATION_SHARE = 0.01  # of the duration: codecs pad, and lists round
FRAME = 0.02  # seconds over which loudness is measured
SHORTEST_BREAK = 0.5  # seconds: of less nothing is said about its end
PAUSE = 0.1  # a pause has at most this part of the mean amplitude: 20 dB below
_OGG_TAIL = 1 << 16  # bytes at the end of an Ogg file in which its last page begins


def recording_problems(clip: Clip, sampling_rate: int = 16_000) -> list[RecordingError]:
    """Return what is suspicious about a recording that can be read; it is decoded for that.

    - It is silent: no sample is louder than -80 dB.
    - It is overloaded: more than 1% of the samples of a channel lie at full scale.
    - It breaks off: its last 20 ms are at least as loud as the whole is on average, although it has pauses (2% of it at
      least 20 dB below that average); or an Ogg file lacks the page that ends it.
    - It begins more than 5 minutes behind the beginning of an MP3 file, from which each reading decodes.
    - Its duration differs from what the record says by more than 0.1 s and 1%.

    These are no errors: training reads such recordings.

    Raises:
        RecordingError: it cannot be read.
        DataError: a package is missing.
    """
    sound = read_clip(clip, sampling_rate)
    found = []
    peak, seconds = float(np.abs(sound).max()), len(sound) / sampling_rate
    declared = clip.duration
    if declared is not None and abs(seconds - declared) > max(DURATION_TOLERANCE, DURATION_SHARE * declared):
        found.append(RecordingError(clip, f"{declared:g} s, as the record says", f"{seconds:.3f} s"))
    if peak <= SILENCE:
        told = f"silence (peak {20 * np.log10(peak):.0f} dB)" if peak else "silence (every sample is 0)"
        return [*found, RecordingError(clip, "sound", told)]
    stretch, at_full_scale = _full_scale(clip)
    if at_full_scale > MAX_OVERLOADED:
        expected = f"at most {MAX_OVERLOADED:.0%} of the samples at full scale"
        found.append(RecordingError(clip, expected, f"{at_full_scale:.1%}: the recording is overloaded (clipped)"))
    if stretch.format == "MP3" and stretch.first > MAX_SKIPPED * stretch.rate:
        told = "MP3, which is decoded from its beginning for every clip: convert it, `ffmpeg -i OLD.mp3 NEW.flac`"
        found.append(RecordingError(clip, "a format that can be entered anywhere", told))
    if _lacks_last_page(clip):
        found.append(RecordingError(clip, "a last page of the Ogg file", "none: the file is cut off"))
    if _breaks_off(sound, sampling_rate):
        found.append(
            RecordingError(clip, "a quiet end", "a loud one: the recording breaks off in the middle of a sound")
        )
    return found


def _full_scale(clip: Clip) -> tuple[Stretch, float]:
    """Return where a clip is, and the share of its samples at full scale, of the channel that has most."""
    count: np.ndarray | int = 0
    with decoding(clip) as (stretch, blocks):
        for block in blocks:
            count = count + np.count_nonzero(np.abs(block) >= FULL_SCALE, axis=0)
    return stretch, float(np.max(count)) / stretch.frames


def _breaks_off(sound: np.ndarray, sampling_rate: int) -> bool:
    """Return whether a recording with pauses ends loudly."""
    if len(sound) < SHORTEST_BREAK * sampling_rate:
        return False
    size = round(FRAME * sampling_rate)
    frames = sound[len(sound) % size :].reshape(-1, size)
    loudness = np.sqrt(np.mean(np.square(frames, dtype=np.float64), axis=1))
    mean = float(np.sqrt(np.mean(loudness**2)))
    return bool(np.quantile(loudness, 0.02) <= PAUSE * mean and loudness[-1] >= mean)


def _lacks_last_page(clip: Clip) -> bool:
    """Return whether the last page of an Ogg file is not marked as such. A clip may end before it."""
    source = recording_source(clip)
    if isinstance(source, BytesIO):
        head, tail = source.getvalue()[:4], source.getvalue()[-_OGG_TAIL:]
    else:
        with open(source, "rb") as file:
            head = file.read(4)
            file.seek(max(0, os.path.getsize(source) - _OGG_TAIL))
            tail = file.read()
    last = tail.rfind(b"OggS")
    ends = last >= 0 and len(tail) > last + 5 and tail[last + 5] & 4
    return head == b"OggS" and clip.end is None and not ends
