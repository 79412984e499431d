"""What the token cache records of recordings: how many and how long they are, and what their files looked like."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from erniekit.data.media.clip import PlacedClip
from erniekit.data.token_cache import Metadata, TokenArrays

GLIMPSE_BYTES = 1 << 15
MAX_THREADS = 8  # they wait for the disk
AUDIO = "audio"  # the entry of the metadata; only data with recordings has it


@dataclass(frozen=True, slots=True)
class AudioCounts:
    """The recordings of the samples of a source.

    Attributes:
        clips: their number; one that stands in two samples counts twice.
        seconds: of sound.
        tokens: their placeholders.
    """

    clips: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def __str__(self) -> str:
        rate = f"{self.tokens / self.seconds:.3g} tokens a second"
        return f"{self.clips:,} recordings, {duration(self.seconds)} of sound ({self.tokens:,} tokens, {rate})"


def duration(seconds: float) -> str:
    """Return a length of time in the unit that suits it."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


class RecordingFacts:
    """Takes the clips of samples as they are built, one after another."""

    def __init__(self, sampling_rate: int) -> None:
        self._sampling_rate = sampling_rate
        self._clips = self._samples = self._tokens = 0
        self._sound = hashlib.blake2b(digest_size=8)
        self._files = FileStamps()

    def add(self, clips: Sequence[PlacedClip]) -> None:
        """Take the clips of a block of samples."""
        if not clips:
            return
        paths = list(dict.fromkeys(each.clip.path for each in clips if each.clip.row < 0))
        with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="recordings") as pool:
            glimpses = dict(zip(paths, pool.map(glimpse, paths), strict=True))
        for each in clips:
            self._clips += 1
            self._samples += each.length
            self._tokens += each.tokens
            self._sound.update(f"{each.length} {glimpses.get(each.clip.path, '')} ".encode())
            self._files.add(each.clip.path)

    def metadata(self) -> Metadata:
        """Return the entry for the metadata of a source; empty where it has no recordings."""
        if not self._clips:
            return {}
        counts = {"clips": self._clips, "seconds": self._samples / self._sampling_rate, "tokens": self._tokens}
        return {AUDIO: {**counts, "sound": self._sound.hexdigest(), "files": self._files.hexdigest()}}


def audio_counts(metadata: Metadata) -> AudioCounts | None:
    """Return the recordings of a source from its metadata; None where it has none."""
    stored: dict[str, Any] | None = metadata.get(AUDIO)
    return None if stored is None else AudioCounts(stored["clips"], stored["seconds"], stored["tokens"])


def sound_digest(metadata: Metadata) -> str:
    """Return what changes when the recordings of a source do, wherever they lie; "" where it has none.

    It knows the length of each clip and a stretch in the middle of its file, because reading all takes too long.
    """
    return str(metadata.get(AUDIO, {}).get("sound", ""))


def glimpse(path: str) -> str:
    """Return a digest of the stretch in the middle of a file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size // 2 - GLIMPSE_BYTES // 2))
            return hashlib.blake2b(file.read(GLIMPSE_BYTES), digest_size=8).hexdigest()
    except OSError:  # it has just been read; whoever reads it next tells what is wrong
        return ""


def recordings_unchanged(arrays: TokenArrays) -> bool:
    """Return whether the files of all recordings have the size and the time of when their samples were built."""
    if AUDIO not in arrays.metadata:
        return True
    files = FileStamps()
    for path in arrays.clip_paths():
        files.add(path)
    return files.hexdigest() == arrays.metadata[AUDIO]["files"]


class FileStamps:
    """A digest of the sizes and times of files; a file that is named several times in a row is looked at once."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)
        self._last = ""

    def add(self, path: str) -> None:
        if path == self._last:
            return
        self._last = path
        try:
            status = os.stat(path)
            stamp = (path, status.st_size, status.st_mtime_ns)
        except OSError:
            stamp = (path, -1, -1)
        self._digest.update(repr(stamp).encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
