"""Turn FlashMask's indices into a plan of small attention blocks. NumPy only.

FlashMask (Wang et al., 2024, arXiv:2410.01359) describes a mask by columns. `startend_row_indices` is int32 [B, Hm, S,
n] with Hm = 1, the number of key heads, or the number of query heads. It lists, for each key column, the query rows
that may NOT see it:

| causal | n | masked rows |
|---|---|---|
| yes | 1: start                          | row >= start, and row < column |
| yes | 2: start, end                     | start <= row < end, and row < column |
| no  | 2: lower start, upper end         | row >= lower start, and row < upper end |
| no  | 4: lower start, lower end, upper start, upper end | the rows of the two half-open ranges |

The S x S square of each batch row is cut at borders that no attention crosses (the borders of documents), and long
documents into tiles of queries, each with the range of tiles that contain its keys. So the cost follows the sum of
squared document lengths, and for windowed masks the width of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

TILE = 256  # queries per block: longer tiles waste more of the causal triangle, shorter ones need more calls
MASKED = -1e30  # added to scores that are not seen; finite: a softmax over masked entries only does not give NaN
MERGE_BELOW = 128  # neighbouring documents shorter than this share a block with a local mask


@dataclass(frozen=True)
class AttentionBlock:
    """The queries of one tile and the keys of tiles [first_key_tile, end_key_tile) of the same batch row.

    Attributes:
        masked: bool [Hm, queries, keys], or None.
        causal: the queries are the last tile of the key range, and only the causal triangle is masked.
        has_dead_rows: some query sees no key.
    """

    query_tile: int
    first_key_tile: int
    end_key_tile: int
    masked: np.ndarray | None
    causal: bool
    has_dead_rows: bool

    @property
    def key_tiles(self) -> slice:
        return slice(self.first_key_tile, self.end_key_tile)


@dataclass(frozen=True)
class BlockPlan:
    """Tiles that partition the B * S flattened tokens (`tile_lengths`), and the blocks that attention computes.

    There is at most one block per query tile; the queries of a tile without a block see no key.
    """

    tile_lengths: tuple[int, ...]
    blocks: tuple[AttentionBlock, ...]

    def key_count(self, block: AttentionBlock) -> int:
        return sum(self.tile_lengths[block.key_tiles])

    def score_count(self) -> int:
        """Return the number of query-key products per head."""
        return sum(self.tile_lengths[block.query_tile] * self.key_count(block) for block in self.blocks)


def plan_blocks(indices: np.ndarray, causal: bool, *, tile: int = TILE, merge_below: int = MERGE_BELOW) -> BlockPlan:
    """Cut every batch row into blocks. `indices` is FlashMask's int32 [B, Hm, S, n]."""
    tile_lengths: list[int] = []
    blocks: list[AttentionBlock] = []
    for row_indices in indices:
        first, last = visible_range(row_indices, causal)
        for start, stop in cut_segments(first, last, merge_below):
            borders = _tile_borders(start, stop, tile)
            blocks.extend(_segment_blocks(row_indices, causal, borders, len(tile_lengths), first, last))
            tile_lengths.extend(np.diff(borders).tolist())
    return BlockPlan(tuple(tile_lengths), tuple(blocks))


def masked_region(indices: np.ndarray, causal: bool, rows: slice, columns: slice) -> np.ndarray:
    """Return where attention is masked, bool [Hm, rows, columns], from the indices [Hm, S, n] of one batch row."""
    row = np.arange(rows.start, rows.stop, dtype=np.int32)[:, None]
    bounds = [indices[:, None, columns, i] for i in range(indices.shape[-1])]
    if causal:
        column = np.arange(columns.start, columns.stop, dtype=np.int32)[None, :]
        lower = row >= bounds[0] if len(bounds) == 1 else (row >= bounds[0]) & (row < bounds[1])
        return lower | (row < column)
    if len(bounds) == 2:
        return (row >= bounds[0]) | (row < bounds[1])
    return ((row >= bounds[0]) & (row < bounds[1])) | ((row >= bounds[2]) & (row < bounds[3]))


def visible_range(indices: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last row that may see each column under any head, int [S] each; last < first if no row does.

    The range may contain masked rows; it contains every visible one.
    """
    length = indices.shape[1]
    column = np.arange(length)
    if causal:
        start = indices[..., 0]
        stop = start if indices.shape[-1] == 1 else np.where(indices[..., 1] < length, length, start)
        first, last = np.broadcast_to(column, start.shape), stop - 1
    elif indices.shape[-1] == 2:
        first, last = indices[..., 1], indices[..., 0] - 1
    else:
        lower_start, lower_end, upper_start, upper_end = (indices[..., i] for i in range(4))
        first = np.where(upper_start > 0, 0, upper_end)
        last = np.where(lower_end < length, length, lower_start) - 1
        # An empty range masks nothing.
        first = np.where(upper_end <= upper_start, 0, first)
        last = np.where(lower_end <= lower_start, length - 1, last)
    first, last = np.maximum(first, 0), np.minimum(last, length - 1)
    empty = last < first
    return np.where(empty, length, first).min(0), np.where(empty, -1, last).max(0)


def cut_segments(first: np.ndarray, last: np.ndarray, merge_below: int) -> Iterator[tuple[int, int]]:
    """Cut one batch row at borders that no attention crosses; join short neighbours until they reach `merge_below`."""
    length = len(first)
    column = np.arange(length)
    dead = last < 0
    # A border before position p is free if no row from p on sees an earlier column, and no row before p a later one.
    reach_down = np.maximum.accumulate(np.maximum(last, -1))
    reach_up = np.minimum.accumulate(first[::-1])[::-1]
    free = np.zeros(length + 1, bool)
    free[0] = free[length] = True
    free[1:length] = (reach_down[:-1] < column[1:]) & (reach_up[1:] >= column[1:])
    borders = np.nonzero(free)[0].tolist()
    start = 0
    for stop, following in zip(borders[1:], [*borders[2:], None], strict=True):
        joins_next = following is not None and stop - start < merge_below
        if joins_next and dead[stop] == dead[stop - 1]:
            continue
        yield start, stop
        start = stop


def _tile_borders(start: int, stop: int, tile: int) -> list[int]:
    count = -(-(stop - start) // tile)
    return np.linspace(start, stop, count + 1).round().astype(int).tolist()


def _segment_blocks(
    indices: np.ndarray, causal: bool, borders: list[int], first_tile: int, first: np.ndarray, last: np.ndarray
) -> Iterator[AttentionBlock]:
    """Yield the blocks of one segment, whose tiles lie between `borders` and are numbered from `first_tile`."""
    start, stop = borders[0], borders[-1]
    if causal and indices.shape[-1] == 1 and (indices[:, start:stop, 0] >= stop).all():  # one document
        for number in range(len(borders) - 1):
            yield AttentionBlock(first_tile + number, first_tile, first_tile + number + 1, None, True, False)
        return
    edges = np.asarray(borders)
    for number, (top, bottom) in enumerate(pairwise(borders)):
        seen = np.nonzero((first[start:stop] < bottom) & (last[start:stop] >= top))[0]
        if not seen.size:
            continue
        left = int(np.searchsorted(edges, start + seen[0], side="right")) - 1
        right = int(np.searchsorted(edges, start + seen[-1], side="right"))
        masked = masked_region(indices, causal, slice(top, bottom), slice(borders[left], borders[right]))
        if masked.all():
            continue
        dead_rows = bool(masked.all(-1).any())
        keep = masked if masked.any() else None
        yield AttentionBlock(first_tile + number, first_tile + left, first_tile + right, keep, False, dead_rows)
