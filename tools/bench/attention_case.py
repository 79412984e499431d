"""The masks and numbers that every side of the attention benchmark works on. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MEAN, SIGMA, SHORTEST = 512, 0.8, 16  # of the log-normal lengths of documents and of questions with their answers
MASKS = ("document", "shared question", "full causal", "both ways")


class Heads(NamedTuple):
    """Query heads, key heads, head size; as text "8 2 64"."""

    queries: int = 8
    keys: int = 2
    size: int = 64

    @classmethod
    def of(cls, text: str) -> Heads:
        return cls(*map(int, text.split()))

    def __str__(self) -> str:
        return f"{self.queries} {self.keys} {self.size}"


class Sample(NamedTuple):
    """Where a document, or a question with two answers, lies in the row: the answers begin at `chosen` and `rejected`,
    which are both `end` in a plain document. `both_ways`: its tokens see later ones, too, as masked codes do."""

    start: int
    chosen: int
    rejected: int
    end: int
    both_ways: bool = False


def samples(mask: str, length: int) -> list[Sample]:
    """A full row of `length` tokens. `mask`: one of MASKS, or "equal N" for documents of N tokens."""
    kind, _, size = mask.partition(" ")
    if mask == "full causal":
        lengths = [length]
    elif kind == "equal":
        lengths = [int(size)] * (length // int(size))
    else:
        rng = np.random.default_rng(length)
        drawn = np.clip(rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, length // SHORTEST), SHORTEST, length)
        ends = np.cumsum(drawn.astype(int))
        inner = ends[ends <= length - SHORTEST]
        lengths = np.diff([0, *inner, length]).tolist()
    row, start = [], 0
    for own in lengths:
        end = start + own
        half, quarter = own // 2, own // 4
        shared = mask == "shared question"
        chosen, rejected = (start + half, start + half + quarter) if shared else (end, end)
        row.append(Sample(start, chosen, rejected, end, mask == "both ways"))
        start = end
    return row


def document_ends(row: Sequence[Sample]) -> np.ndarray:
    """int32 [S]: for each key the first query after it that does not see it, as `erniekit.data.collate` has it."""
    ends = np.empty(row[-1].end, np.int32)
    for sample in row:
        ends[sample.start : sample.end] = sample.end
        ends[sample.chosen : sample.rejected] = sample.rejected
    return ends


def first_queries(row: Sequence[Sample]) -> np.ndarray:
    """int32 [S]: for each key the first query that sees it: its own, or the document's where it is read both ways."""
    first = np.arange(row[-1].end, dtype=np.int32)
    for sample in row:
        if sample.both_ways:
            first[sample.start : sample.end] = sample.start
    return first


def visible_pairs(row: Sequence[Sample]) -> int:
    """Pairs of a query and a key that it sees; of causal documents half the sum of their squared lengths, and half a
    pair a token."""
    return int((document_ends(row) - first_queries(row)).sum())


class Inputs(NamedTuple):
    """float32 [1, S, N, D]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gradient: np.ndarray


def inputs(length: int, heads: Heads) -> Inputs:
    rng = np.random.default_rng(length)
    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    return Inputs(*(rng.standard_normal((1, length, count, heads.size), np.float32) for count in counts))
