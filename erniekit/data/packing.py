"""Assign samples to packed rows, or to micro-batches of similar length, by their lengths alone before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Packs:
    """A list of index arrays, stored as one: pack i is members[starts[i] : starts[i + 1]].

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

    def select_from(self, items: np.ndarray) -> Packs:
        """Return the same packs of other indices: members become items[members]."""
        return Packs(items[self.members], self.starts)

    def reordered(self, order: np.ndarray) -> Packs:
        """Return the packs in another order."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        # Position p of the new members is as far after its pack's old start as after its new one.
        shift = np.repeat(self.starts[:-1][order] - starts[:-1], sizes)
        return Packs(self.members[np.arange(len(self.members)) + shift], starts)


def concatenate_packs(parts: list[Packs]) -> Packs:
    """Concatenate lists of packs."""
    sizes = [np.diff(part.starts) for part in parts]
    members = np.concatenate([np.empty(0, np.int64), *(part.members for part in parts)])
    return Packs(members, np.concatenate(([0], np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes])))))


SHUFFLED_FILL_UNTIL = 0.25  # of a pack's capacity; the room above it is filled in the given order


def pack_greedy(lengths: np.ndarray, capacity: int) -> Packs:
    """Open each pack with the longest sample left, fill three quarters of it in order, and complete it with best fits.

    The best fit is the longest sample left that still fits, repeatedly until none does. The given order should be
    shuffled. Best fit *decreasing* alone, without the part in order, fills packs no better, but with samples of one
    length, hence often of one kind, so that a step learns from a few kinds only: docs/benchmarks.md has both numbers.
    Like every algorithm that closes a pack only when nothing fits, it needs less than twice the optimum.

    Args:
        lengths: int[n], each from 1 to `capacity`.
    """
    pool = _Pool(_checked(lengths, capacity))
    shuffled_fill_until = int(capacity * SHUFFLED_FILL_UNTIL)
    members: list[int] = []
    starts = [0]
    while len(members) < len(lengths):
        room = capacity - pool.take_longest(capacity, members)
        while room > shuffled_fill_until and (length := pool.take_next(room, members)):
            room -= length
        while length := pool.take_longest(room, members):
            room -= length
        starts.append(len(members))
    return Packs(np.array(members, np.int64), np.array(starts))


class _Pool:
    """The samples that are in no pack yet, to be taken by length or in order."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._length_of: list[int] = lengths.tolist()
        self._taken = bytearray(len(lengths))
        self._next = 0  # no sample before this index is free
        order = np.argsort(lengths, kind="stable")
        distinct, firsts = np.unique(lengths[order], return_index=True)
        groups = np.split(order, firsts[1:]) if len(order) else []
        # Reversed, so that pop() returns the first of the samples of a length.
        self._by_length = {int(length): group[::-1].tolist() for length, group in zip(distinct, groups, strict=True)}
        self._length_bits = sum(1 << length for length in self._by_length)  # bit l: some sample may have length l

    def take_longest(self, room: int, members: list[int]) -> int:
        """Append the longest sample of at most `room` to `members`; return its length, 0 if none fits."""
        while fitting := self._length_bits & ((2 << room) - 1):
            length = fitting.bit_length() - 1
            group = self._by_length[length]
            while group:
                sample = group.pop()
                if not self._taken[sample]:
                    self._taken[sample] = 1
                    members.append(sample)
                    return length
            self._length_bits ^= 1 << length
        return 0

    def take_next(self, room: int, members: list[int]) -> int:
        """Append the first free sample in order; return its length, 0 if it does not fit or none is left."""
        while self._next < len(self._taken) and self._taken[self._next]:
            self._next += 1
        if self._next == len(self._taken) or self._length_of[self._next] > room:
            return 0
        self._taken[self._next] = 1
        members.append(self._next)
        return self._length_of[self._next]


def pack_sequential(lengths: np.ndarray, capacity: int) -> Packs:
    """Pack samples in the given order and start a new pack whenever the next one does not fit (next-fit)."""
    lengths = _checked(lengths, capacity)
    ends = np.cumsum(lengths)
    starts = [0]
    while starts[-1] < len(lengths):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(int(np.searchsorted(ends, before + capacity, side="right")))
    return Packs(np.arange(len(lengths)), np.array(starts))


def pack_none(lengths: np.ndarray) -> Packs:
    """Return packs of one sample each."""
    return Packs(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def _checked(lengths: np.ndarray, capacity: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= capacity), "lengths must be in 1..capacity"
    return lengths


# Micro-batches of samples of similar length, the alternative to packing: a budget of tokens bounds the padding.


def group_by_length(lengths: np.ndarray, budget: int, max_samples: int = 0) -> Packs:
    """Group samples so that number of samples x longest sample is at most `budget`, the shortest group first.

    The longest sample left opens a group, and the next longest join it until another would exceed the budget; so only
    the group of the shortest may be smaller than possible. Samples of the same length stay in the given order.

    Args:
        lengths: int[n], each from 1 to `budget`.
        budget: positions of a group, padding included.
        max_samples: maximum samples of a group; 0 for no limit.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= budget), "lengths must be in 1..budget"
    by_length = np.argsort(lengths, kind="stable")
    ends = [len(by_length)]
    while ends[-1]:
        size = budget // int(lengths[by_length[ends[-1] - 1]])
        ends.append(max(0, ends[-1] - (min(size, max_samples) if max_samples else size)))
    return Packs(by_length, np.array(ends[::-1]))
