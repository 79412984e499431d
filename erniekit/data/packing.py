"""Which samples share a row: decided by their lengths alone, known before training starts."""

from __future__ import annotations

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

    def select_from(self, items: np.ndarray) -> Packs:
        """The same packs over other names: members become items[members]."""
        return Packs(items[self.members], self.starts)

    def reordered(self, order: np.ndarray) -> Packs:
        """The packs in another order."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        # position p of the new members lies as far behind its pack's old start as behind its new one
        shift = np.repeat(self.starts[:-1][order] - starts[:-1], sizes)
        return Packs(self.members[np.arange(len(self.members)) + shift], starts)


def concatenate_packs(parts: list[Packs]) -> Packs:
    """All packs one after another."""
    sizes = [np.diff(part.starts) for part in parts]
    members = np.concatenate([np.empty(0, np.int64), *(part.members for part in parts)])
    return Packs(members, np.concatenate(([0], np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes])))))


SHUFFLED_FILL_UNTIL = 0.25  # of a pack's capacity: room beyond it is filled in the order given


def pack_greedy(lengths: np.ndarray, capacity: int) -> Packs:
    """The longest sample left opens a pack, the next in order fill three quarters of it, the best fits complete it.

    The best fit is the longest sample left that still fits, again and again until none does. The order given should be
    a shuffled one. Best fit *decreasing* alone, without the part in order, fills packs no better, but with samples of
    one length, hence often of one kind, so that a step learns from a few kinds only: docs/benchmarks.md has both
    figures. Like every algorithm that closes a pack only when nothing fits, it needs less than twice the optimum.

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
    """The samples that no pack holds yet, to be taken by length or in their order."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._length_of: list[int] = lengths.tolist()
        self._taken = bytearray(len(lengths))
        self._next = 0  # no sample before it is free
        order = np.argsort(lengths, kind="stable")
        distinct, firsts = np.unique(lengths[order], return_index=True)
        groups = np.split(order, firsts[1:]) if len(order) else []
        # reversed, so that pop() gives the first of the samples of a length
        self._by_length = {int(length): group[::-1].tolist() for length, group in zip(distinct, groups, strict=True)}
        self._length_bits = sum(1 << length for length in self._by_length)  # bit l: some sample may have length l

    def take_longest(self, room: int, members: list[int]) -> int:
        """Append the longest sample of at most `room` to `members`; returns its length, 0 where none fits."""
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
        """Append the first free sample in order; returns its length, 0 where it does not fit or none is left."""
        while self._next < len(self._taken) and self._taken[self._next]:
            self._next += 1
        if self._next == len(self._taken) or self._length_of[self._next] > room:
            return 0
        self._taken[self._next] = 1
        members.append(self._next)
        return self._length_of[self._next]


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


# Micro-batches of samples of similar length, the alternative to packing: padding is bounded by a budget of tokens.


def group_by_length(lengths: np.ndarray, budget: int, max_samples: int = 0) -> Packs:
    """Groups whose number of samples times their longest one is at most `budget`, the shortest group first.

    The longest sample left opens a group, and the next longest join it until another would exceed the budget; so only
    the group of the shortest may be smaller than it could be. Samples of one length stay in the order given.

    Args:
        lengths: int[n], each from 1 to `budget`.
        budget: positions of a group, padding included.
        max_samples: samples of a group; 0 for no limit.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= budget), "lengths must be in 1..budget"
    by_length = np.argsort(lengths, kind="stable")
    ends = [len(by_length)]
    while ends[-1]:
        size = budget // int(lengths[by_length[ends[-1] - 1]])
        ends.append(max(0, ends[-1] - (min(size, max_samples) if max_samples else size)))
    return Packs(by_length, np.array(ends[::-1]))
