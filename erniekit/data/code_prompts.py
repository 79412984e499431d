"""Draw acoustic prompts: stretches of recordings by the speaker of another one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SAME_SPEAKER, SIMILAR, ITSELF = range(3)  # where the first utterance of a prompt comes from


class SpeakerIndex:
    """The recordings of each speaker.

    Args:
        speaker: int[n], the number of each recording's speaker; -1 for one who is known by this recording alone.
    """

    def __init__(self, speaker: np.ndarray) -> None:
        count = len(speaker)
        own = np.where(speaker >= 0, speaker, speaker.max(initial=0) + 1 + np.arange(count))
        self._order = np.argsort(own, kind="stable")
        _, number, counts = np.unique(own, return_inverse=True, return_counts=True)
        self._first = (np.cumsum(counts) - counts)[number]
        self.count = counts[number]  # of the recordings of each one's speaker
        self._rank = np.empty(count, np.int64)
        self._rank[self._order] = np.arange(count) - self._first[self._order]

    def another(self, records: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        """Return for each record another one of its speaker, equally likely ones: int64; -1 where there is none."""
        others = self.count[records] - 1
        place = (uniform * others).astype(np.int64)
        place += place >= self._rank[records]
        found = self._order[self._first[records] + np.minimum(place, others)]
        return np.where(others > 0, found, -1)


class Prompts(NamedTuple):
    """The stretches that make the prompts of n recordings, up to K each; of one that is not there, `frames` is 0.

    Attributes:
        record, begin, frames: int64[n, K], the recording, the first frame of it, and how many.
    """

    record: np.ndarray
    begin: np.ndarray
    frames: np.ndarray


def draw_prompts(
    records: np.ndarray,
    uniform: np.ndarray,
    *,
    wanted: np.ndarray,
    source: np.ndarray,
    frames: np.ndarray,
    speakers: SpeakerIndex,
    similar: np.ndarray | None,
    utterances: int,
) -> Prompts:
    """Draw the prompts of some recordings.

    Args:
        records: int64[n].
        uniform: float64[n, 2 K]; of each utterance which one it is, and where its stretch begins.
        wanted: int64[n], the frames of each prompt; it is shorter where the utterances are.
        source: int64[n], SAME_SPEAKER, SIMILAR or ITSELF.
        frames: int64[all], of all recordings.
        similar: int64[all], the recording that is most similar to each, -1 for none; None: nobody asks.
        utterances: how many are joined at most. The first is of `source`; the others are drawn of the speaker, and may
            come twice. A prompt of the recording itself is one stretch.
    """
    found = Prompts(*np.zeros((3, len(records), utterances), np.int64))
    missing = wanted.copy()
    for number in range(utterances):
        chosen = speakers.another(records, uniform[:, 2 * number])
        if number == 0 and similar is not None:
            chosen = np.where((source == SIMILAR) & (similar[records] >= 0), similar[records], chosen)
        chosen = np.where(source == ITSELF, records if number == 0 else -1, chosen)
        available = np.where(chosen >= 0, frames[chosen], 0)
        taken = np.minimum(available, missing)
        found.record[:, number] = chosen
        found.begin[:, number] = (uniform[:, 2 * number + 1] * (available - taken + 1)).astype(np.int64)
        found.frames[:, number] = taken
        missing -= taken
    return found
