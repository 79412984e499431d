"""Which key-value blocks belong to which request (PagedAttention: Kwon et al., 2023, arXiv:2309.06180, section 4.3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from erniekit.inference.decoding.step import BLOCK_TOKENS


def blocks_of(tokens: int) -> int:
    """Return how many blocks hold so many tokens of one sequence."""
    return -(-tokens // BLOCK_TOKENS)


class BlockTables:
    """The blocks of each request, out of `count` blocks.

    The lowest free number is given out first, so that the numbers in use stay small and every rank gives out the same.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._returned: list[int] = []  # a heap; those from `_untouched` on were never in use
        self._untouched = 0
        self._tables: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """The number of blocks that no request has."""
        return self.count - self._untouched + len(self._returned)

    def extend(self, request: int, tokens: int) -> bool:
        """Give a request the blocks that `tokens` tokens need; False, and nothing changes, if there are too few."""
        table = self._tables.setdefault(request, [])
        missing = blocks_of(tokens) - len(table)
        if missing > self.free:
            return False
        table.extend(self._take() for _ in range(missing))
        return True

    def room(self, request: int) -> int:
        """Return how many tokens the blocks of a request hold."""
        return len(self._tables.get(request, ())) * BLOCK_TOKENS

    def release(self, request: int) -> None:
        """Take back the blocks of a request, if it has any."""
        for block in self._tables.pop(request, ()):
            heapq.heappush(self._returned, block)

    def tables(self, requests: Sequence[int]) -> np.ndarray:
        """Return the blocks of requests in the order of their tokens, int32 [N, longest], then -1."""
        tables = [self._tables[request] for request in requests]
        array = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in zip(array, tables, strict=True):
            row[: len(table)] = table
        return array

    def _take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._untouched += 1
        return self._untouched - 1
