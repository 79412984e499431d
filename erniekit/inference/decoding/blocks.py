"""Which key-value blocks belong to which request (PagedAttention: Kwon et al., 2023, arXiv:2309.06180, section 4.3)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from erniekit.inference.decoding.step import BLOCK_TOKENS


def blocks_of(tokens: int) -> int:
    """Return how many blocks hold so many tokens of one sequence."""
    return -(-tokens // BLOCK_TOKENS)


class Content(NamedTuple):
    """What a full block holds: its tokens, behind those of the block before it, or as the first ones of `model`."""

    before: int | None
    model: str
    tokens: tuple[int, ...]


class BlockTables:
    """The blocks of each request, out of `count` blocks; several requests may have the same one.

    The lowest free number is given out first, so that the numbers in use stay small and every rank gives out the same.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._returned: list[int] = []  # a heap; those from `_untouched` on were never in use
        self._untouched = 0
        self._tables: dict[int, list[int]] = {}
        self._users: Counter[int] = Counter()  # how many requests have a block
        self._offered: dict[Content, int] = {}
        self._contents: dict[int, Content] = {}  # of the blocks that are offered

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

    def content(self, request: int, number: int, tokens: Sequence[int], model: str) -> Content:
        """Return what block `number` of a request with these tokens holds once it is full."""
        before = self._tables[request][number - 1] if number else None
        return Content(before, model, tuple(tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]))

    def offer(self, request: int, number: int, content: Content) -> None:
        """Let others have a block of a request, which is full, as long as somebody has it."""
        block = self._tables[request][number]
        if self._offered.setdefault(content, block) == block:
            self._contents[block] = content

    def adopt(self, request: int, number: int, content: Content) -> bool:
        """Take the block of another request in the place of the own one, if one with this content is offered."""
        block, table = self._offered.get(content), self._tables[request]
        if block is None:
            return False
        self._users[block] += 1
        self._give_back(table[number])
        table[number] = block
        return True

    def room(self, request: int) -> int:
        """Return how many tokens the blocks of a request hold."""
        return len(self._tables.get(request, ())) * BLOCK_TOKENS

    def release(self, request: int) -> None:
        """Take back the blocks of a request, if it has any."""
        for block in self._tables.pop(request, ()):
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        heapq.heappush(self._returned, block)
        if content := self._contents.pop(block, None):
            del self._offered[content]

    def tables(self, requests: Sequence[int]) -> np.ndarray:
        """Return the blocks of requests in the order of their tokens, int32 [N, longest], then -1."""
        tables = [self._tables[request] for request in requests]
        array = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in zip(array, tables, strict=True):
            row[: len(table)] = table
        return array

    def _take(self) -> int:
        if self._returned:
            block = heapq.heappop(self._returned)
        else:
            block = self._untouched
            self._untouched += 1
        self._users[block] = 1
        return block
