"""The sound of what was spoken: silence is shortened, loudness set, edges are faded, pieces joined.

Rules and figures are those of the Python package `omnivoice` (version 0.2.1), which finds silence with `pydub`: over
16-bit samples, in whole milliseconds, at -50 dB of full scale. Sound is float32 [samples] of one channel, -1 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

SILENCE = int(32768 * 10 ** (-50 / 20))  # the largest root mean square of 16-bit samples that is silence
STEP = 10  # milliseconds from one look for silence to the next
QUIET, PEAK = 0.1, 0.5  # the rms up to which a voice is made louder; the peak of a sound whose voice the model chose
GAP_SECONDS = 0.3  # between two pieces: a third fades out, a third is silence, a third fades in


class Kept(NamedTuple):
    """How much silence stays, in milliseconds: between words what is longer is shortened to twice as much."""

    between: int
    start: int
    end: int


OF_SPEECH, OF_REFERENCE = Kept(500, 100, 100), Kept(200, 100, 200)


@dataclass(frozen=True)
class SoundSettings:
    """What is done to the sound of an utterance.

    Attributes:
        keep_silence: leave silence as it is.
        pad, fade: seconds of silence at both ends, and of their fading.
    """

    keep_silence: bool = False
    pad: float = 0.1
    fade: float = 0.1


class JoinedSound:
    """Makes the sound of one utterance of that of its pieces, each as soon as it is there.

    Args:
        rms: of the voice; None: the model chose it.
    """

    def __init__(self, sampling_rate: int, rms: float | None, settings: SoundSettings) -> None:
        self._rate, self._settings, self._begun = sampling_rate, settings, False
        self._gain = None if rms is None else min(1.0, rms / QUIET)

    def add(self, sound: np.ndarray, *, last: bool) -> np.ndarray:
        """Return what follows the sound of the pieces before.

        The first piece that is not silent sets the loudness of all, where the model chose the voice.
        """
        if not self._settings.keep_silence:
            sound = without_silence(sound, self._rate, OF_SPEECH)
        if self._gain is None and (peak := float(np.abs(sound).max(initial=0.0))) > 1e-6:
            self._gain = PEAK / peak
        sound = np.clip(sound * np.float32(1.0 if self._gain is None else self._gain), -1, 1).astype(np.float32)
        pad = np.zeros(int(self._settings.pad * self._rate), np.float32)
        gap = int(GAP_SECONDS * self._rate) // 3
        fade = int(self._settings.fade * self._rate)
        parts = [sound]
        if self._begun:
            _fade_in(sound, gap)
            parts.insert(0, np.zeros(gap, np.float32))
        else:
            _fade_in(sound, min(fade, len(sound) // 2))
            parts.insert(0, pad)
        if last:
            _fade_out(sound, min(fade, len(sound) // 2))
            parts.append(pad)
        else:
            _fade_out(sound, gap)
        self._begun = True
        return np.concatenate(parts)


def _fade_in(sound: np.ndarray, samples: int) -> None:
    """Let a sound begin slowly, in its place."""
    samples = min(samples, len(sound))
    sound[:samples] *= np.linspace(0, 1, samples, dtype=np.float32)


def _fade_out(sound: np.ndarray, samples: int) -> None:
    """Let a sound end slowly, in its place."""
    samples = min(samples, len(sound))
    sound[len(sound) - samples :] *= np.linspace(1, 0, samples, dtype=np.float32)


def loudness(sound: np.ndarray) -> float:
    """Return the root mean square of a sound."""
    return float(np.sqrt(np.mean(np.square(sound)))) if len(sound) else 0.0


def louder(sound: np.ndarray) -> np.ndarray:
    """Return a reference with an rms of at least 0.1, as voices are in the data of models; silence stays."""
    rms = loudness(sound)
    return sound * np.float32(QUIET / rms) if 0 < rms < QUIET else sound


def without_silence(sound: np.ndarray, sampling_rate: int, kept: Kept) -> np.ndarray:
    """Return a sound without silence at its ends, and with shorter silence between words; empty if nothing is heard.

    The length is in whole milliseconds, so up to one of them is left out at the end, or filled up.
    """
    cut = _Cutter(sampling_rate)
    total = cut.milliseconds(sound)
    spans = [[start - kept.between, end + kept.between] for start, end in _heard(sound, cut, kept.between)]
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            before[1] = after[0] = (before[1] + after[0]) // 2
    parts = [cut(sound, max(start, 0), min(end, total)) for start, end in spans]
    sound = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    for edge in (kept.start, kept.end):  # the end is the start of what is turned round
        silent = _silent_start(sound, cut)
        sound = cut(sound, max(0, silent - edge), cut.milliseconds(sound))[::-1]
    return sound.copy()


@dataclass(frozen=True)
class _Cutter:
    """Cuts stretches of milliseconds out of a sound."""

    rate: int

    def milliseconds(self, sound: np.ndarray) -> int:
        return round(1000 * (len(sound) / self.rate))

    def __call__(self, sound: np.ndarray, start: int, end: int) -> np.ndarray:
        """Return the stretch, with zeros where the sound ends within its last millisecond."""
        end = min(end, self.milliseconds(sound))
        first, stop = self.sample(min(start, end)), self.sample(end)
        return np.pad(sound[first:stop], (0, max(0, stop - max(first, len(sound)))))

    def sample(self, millisecond: int) -> int:
        return int(millisecond * (self.rate / 1000.0))


def _heard(sound: np.ndarray, cut: _Cutter, least: int) -> list[tuple[int, int]]:
    """Return the stretches, in milliseconds, between silences of at least so many."""
    total = cut.milliseconds(sound)
    found = list(_silences(sound, cut, least))
    if not found:
        return [(0, total)]
    if found[0] == (0, total):
        return []
    ends = [0, *(end for _, end in found)]
    starts = [*(start for start, _ in found), total]
    return [span for span in zip(ends, starts, strict=True) if span != (0, 0) and span != (total, total)]


def _silences(sound: np.ndarray, cut: _Cutter, least: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of silence in milliseconds: windows that begin every 10 ms, and one that ends with the sound.

    Two of them are one silence also where a window between them is not silent, if they touch each other.
    """
    total = cut.milliseconds(sound)
    if total < least:
        return
    begins = [*range(0, total - least + 1, STEP)]
    if (total - least) % STEP:
        begins.append(total - least)
    sums = _square_sums(cut(sound, 0, total))
    edges = np.array([[cut.sample(begin), cut.sample(begin + least)] for begin in begins])
    silent = _is_silence(sums[edges[:, 1]] - sums[edges[:, 0]], edges[:, 1] - edges[:, 0])
    quiet = [begin for begin, is_silent in zip(begins, silent, strict=True) if is_silent]
    if not quiet:
        return
    start = before = quiet[0]
    for begin in quiet[1:]:
        if begin > before + least:
            yield start, before + least
            start = begin
        before = begin
    yield start, before + least


def _silent_start(sound: np.ndarray, cut: _Cutter) -> int:
    """Return the milliseconds of silence, in steps of 10, with which a sound begins."""
    total = cut.milliseconds(sound)
    sums = _square_sums(cut(sound, 0, total))
    for start in range(0, total, STEP):
        first, stop = cut.sample(start), cut.sample(min(start + STEP, total))
        if not _is_silence(sums[stop : stop + 1] - sums[first], np.array([stop - first])).all():
            return start
    return total


def _square_sums(sound: np.ndarray) -> np.ndarray:
    """Return the sums of the squares of the first n samples as 16-bit integers, int64 [samples + 1]."""
    samples = np.clip(sound * 32768.0, -32768, 32767).astype(np.int16).astype(np.int64)
    return np.concatenate([[0], np.cumsum(samples * samples)])


def _is_silence(squares: np.ndarray, samples: np.ndarray) -> np.ndarray:
    return np.sqrt(squares / np.maximum(samples, 1)) < SILENCE + 1  # the root is rounded down
