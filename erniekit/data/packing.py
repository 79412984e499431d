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
    """Best-fit decreasing: longest first, each into the fullest pack that still has room, else into a new one.

    At most 11/9 of the optimum + 1 packs (Johnson 1973). Samples of equal length are placed together: a pack with
    room r takes floor(r / length) of them in a row, because after each it is still the fullest that fits. So the work
    grows with the number of distinct lengths and rooms, and the samples themselves are only sorted.

    Args:
        lengths: int[n], each from 1 to `capacity`.
    """
    lengths = _checked(lengths, capacity)
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    pack_of: list[int] = []  # of the samples in `order`
    packs_with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # its keys, sorted
    packs = 0

    def put(chosen: list[int], each: int, room: int) -> None:
        """Note `each` samples more for every chosen pack, whose room is then `room`."""
        for pack in chosen:
            pack_of.extend([pack] * each)
        if room in packs_with_room:
            packs_with_room[room] += chosen
        elif room:
            packs_with_room[room] = chosen
            insort(rooms, room)

    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fullest = bisect_left(rooms, length)
            if fullest < len(rooms):
                room = rooms[fullest]
                available = packs_with_room[room]
                each = room // length
                number = min(len(available), -(-count // each))
                chosen = available[-number:]
                if number == len(available):
                    del packs_with_room[room], rooms[fullest]
                else:
                    del available[-number:]
            else:
                room = capacity
                each = room // length
                number = -(-count // each)
                chosen = list(range(packs, packs + number))
                packs += number
            # every pack takes as many as it holds, but the last one perhaps fewer
            last = min(each, count - (number - 1) * each)
            if last == each:
                put(chosen, each, room - each * length)
            else:
                if number > 1:
                    put(chosen[:-1], each, room - each * length)
                put(chosen[-1:], last, room - last * length)
            count -= (number - 1) * each + last
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
