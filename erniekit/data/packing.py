"""Which samples share a row: decided by their lengths alone, known before training starts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Packs:
    """A list of index arrays, stored as one: pack i holds members[starts[i] : starts[i + 1]].

    Attributes:
        members: int64[n].
        starts: int64[packs + 1].
    """

    members: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        return self.members[self.starts[index] : self.starts[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[index] for index in range(len(self)))

    def of(self, items: np.ndarray) -> Packs:
        """The same packs over other names: members become items[members]."""
        return Packs(items[self.members], self.starts)

    def reordered(self, order: np.ndarray) -> Packs:
        """The packs in another order."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        # position p of the new members lies as far behind its pack's old start as behind its new one
        shift = np.repeat(self.starts[:-1][order] - starts[:-1], sizes)
        return Packs(self.members[np.arange(len(self.members)) + shift], starts)


def join(parts: list[Packs]) -> Packs:
    """All packs one after another."""
    sizes = [np.diff(part.starts) for part in parts]
    members = np.concatenate([np.empty(0, np.int64), *(part.members for part in parts)])
    return Packs(members, np.concatenate(([0], np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes])))))


def pack_best_fit(lengths: np.ndarray, capacity: int) -> Packs:
    """Best fit: each sample into the fullest pack that still has room for it, or else into a new one.

    Samples longer than half a pack go first, longest first; no two of them share a pack. The others follow in the order
    given, which should be a shuffled one. To sort them too (best fit *decreasing*) fills packs by 0.1 to 0.7% more, but
    with samples of one length, hence often of one kind, so that a step learns from a few kinds only: on the data of the
    quickstart it left the held-out loss at 0.87 where this order reaches 0.29 in as many steps.
    The worst case of best fit is 1.7 times the optimum (Dosa and Sgall 2014).

    Args:
        lengths: int[n], each from 1 to `capacity`.
    """
    lengths = _checked(lengths, capacity)
    long = 2 * lengths > capacity
    order = np.concatenate((np.argsort(-lengths, kind="stable")[: np.count_nonzero(long)], np.flatnonzero(~long)))
    pack_of: list[int] = []  # of the samples in `order`
    packs_with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # its keys, sorted
    packs = 0
    for length in lengths[order].tolist():
        fullest = bisect_left(rooms, length)
        if fullest == len(rooms):
            pack, room = packs, capacity - length
            packs += 1
        else:
            available = packs_with_room[rooms[fullest]]
            pack, room = available.pop(), rooms[fullest] - length
            if not available:
                del packs_with_room[rooms[fullest]], rooms[fullest]
        pack_of.append(pack)
        if room in packs_with_room:
            packs_with_room[room].append(pack)
        elif room:
            packs_with_room[room] = [pack]
            insort(rooms, room)
    by_pack = np.argsort(np.array(pack_of, np.int64), kind="stable")
    sizes = np.bincount(np.array(pack_of, np.int64), minlength=packs)
    return Packs(order[by_pack], np.concatenate(([0], np.cumsum(sizes))))


def pack_sequential(lengths: np.ndarray, capacity: int) -> Packs:
    """Next-fit: samples in the given order, a new pack whenever the next sample does not fit."""
    lengths = _checked(lengths, capacity)
    ends = np.cumsum(lengths)
    starts = [0]
    while starts[-1] < len(lengths):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, before + capacity, side="right")))
    return Packs(np.arange(len(lengths)), np.array(starts))


def pack_none(lengths: np.ndarray) -> Packs:
    """One sample a pack."""
    return Packs(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _checked(lengths: np.ndarray, capacity: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "lengths must be in 1..capacity"
    return lengths
