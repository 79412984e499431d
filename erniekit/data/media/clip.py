"""A stretch of a recording that a record names, and where its tokens stand in a sample. Nothing of its sound."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Of files that are taken for recordings by their names alone; reading tells those that libsndfile does not open.
SOUND_SUFFIXES = (
    ".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au", ".caf", ".w64", ".rf64",
    ".m4a", ".mp4", ".aac", ".wma", ".webm", ".amr",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clip:
    """A stretch of a recording.

    Attributes:
        path: of the sound file, absolute; of the Parquet or Arrow file where the bytes are in one.
        start: seconds from the beginning of the recording.
        end: in seconds, too; None: the end of the recording.
        row, column: where the bytes of the recording are in such a file: the number of the row, from 0, and the name of
            the column; -1 and "" for a sound file.
        duration: of the stretch in seconds, as the record declares it; None: it does not. Only checks compare it.
    """

    path: str
    start: float = 0.0
    end: float | None = None
    row: int = -1
    column: str = ""
    duration: float | None = None


class ContentClip(NamedTuple):
    """A clip in the content of a turn, before the character with the number `offset`."""

    offset: int
    clip: Clip


class PlacedClip(NamedTuple):
    """A clip in a sample.

    Attributes:
        place: the position of the first of its placeholder tokens, which stand one after the other.
        tokens: the number of these tokens.
        length: the samples of sound, at the sampling rate of the model, from which that number was computed.
    """

    clip: Clip
    place: int
    tokens: int
    length: int


@dataclass(frozen=True)
class AudioInputs:
    """What the encoder of a model takes, as far as the data path has to know it.

    A recording is cut into windows of `window_frames` frames, the last of which may be shorter. The encoder makes
    `window_tokens` states of each window, and the first `tokens_of(frames)` of them stand at placeholder tokens.

    Attributes:
        placeholder_id: the token in whose places the encoder's states stand.
        mel_bins: the channels of the log-mel spectrogram.
        window_frames: the frames of a window, one for each `hop` samples.
        window_tokens: the states that the encoder makes of a window.
        tokens_of: the number of placeholder tokens of a window with so many frames of sound (1 to window_frames).
        sampling_rate: in samples a second, of one channel.
        hop: samples from one frame to the next.
    """

    placeholder_id: int
    mel_bins: int
    window_frames: int
    window_tokens: int
    tokens_of: Callable[[int], int]
    sampling_rate: int = 16_000
    hop: int = 160

    @property
    def window_samples(self) -> int:
        return self.window_frames * self.hop

    def clip_tokens(self, length: int) -> int:
        """Return the number of placeholder tokens of a clip of so many samples; 0 if it is too short for a state."""
        whole, rest = divmod(length, self.window_samples)
        frames = -(-rest // self.hop)
        return whole * self.tokens_of(self.window_frames) + (self.tokens_of(frames) if frames else 0)

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Changes when the same recording would give other tokens or features."""
        counts = [self.tokens_of(frames) for frames in range(1, self.window_frames + 1)]
        shape = (self.mel_bins, self.window_frames, self.window_tokens, self.sampling_rate, self.hop)
        return (self.placeholder_id, *shape, zlib.crc32(repr(counts).encode()))
