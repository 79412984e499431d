"""Turn FlashMask's indices into what the native attention kernel reads (`native/source/attention.c`). NumPy only.

All four forms (see `attention_plan`) become two half-open ranges of queries for each key, those that may not see it.
Tokens of all batch rows are numbered in one sequence and cut into segments, between which there is no attention, and
these into tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from erniekit.model.attention_plan import cut_segments, visible_range

COLUMN_TILE = 48  # tokens of a tile; TILE in attention.c
MERGE_BELOW = 128  # neighbouring documents shorter than this share a segment
_NEVER, _ALWAYS = np.iinfo(np.int32).max, np.iinfo(np.int32).min


class ColumnPlan(NamedTuple):
    """The attention of a batch as tiles and column bounds.

    Attributes:
        tiles: int32 [T, 4]: first token, number of tokens, first and end tile of the segment.
        segments: int32 [N, 2]: first and end tile, the longest segments first.
        bounds: int32 [Hm, T, 4, COLUMN_TILE]: start and end of both ranges of hidden queries for each key of a tile.
            Positions behind the last token of a tile are hidden from all queries.
        extremes: int32 [Hm, T, 2, 4]: the lowest and the highest bounds of a tile.
    """

    tiles: np.ndarray
    segments: np.ndarray
    bounds: np.ndarray
    extremes: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.tiles[:, 1].sum())


def plan_columns(indices: np.ndarray, causal: bool) -> ColumnPlan:
    """Plan the attention of FlashMask's int32 [B, Hm, S, n]."""
    length = indices.shape[2]
    tiles: list[tuple[int, int, int, int]] = []
    segments: list[tuple[int, int]] = []
    for number, row in enumerate(indices):
        for start, stop in cut_segments(*visible_range(row, causal), MERGE_BELOW):
            starts = np.arange(start, stop, COLUMN_TILE)
            first, end = len(tiles), len(tiles) + len(starts)
            tiles.extend((number * length + at, min(COLUMN_TILE, stop - at), first, end) for at in starts)
            segments.append((first, end))
    tiles_T4 = np.array(tiles, np.int32)
    longest_first = sorted(segments, key=lambda segment: segment[0] - segment[1])
    bounds = _tile_bounds(_hidden_ranges(indices, causal), tiles_T4)
    extremes = np.ascontiguousarray(np.stack([bounds.min(-1), bounds.max(-1)], axis=2))
    return ColumnPlan(tiles_T4, np.array(longest_first, np.int32), bounds, extremes)


def _hidden_ranges(indices: np.ndarray, causal: bool) -> np.ndarray:
    """Return int64 [Hm, 4, B * S]: the two ranges of hidden queries, in the numbers of the sequence of all rows."""
    batch, _, length, width = indices.shape
    columns = [indices[..., i].astype(np.int64) for i in range(width)]
    if width == 4:
        ranges = columns
    else:
        end = columns[1] if causal and width == 2 else np.full_like(columns[0], length)
        above = np.broadcast_to(np.arange(length), columns[0].shape) if causal else columns[1]
        ranges = [columns[0], end, np.zeros_like(columns[0]), above]
    rows_BHCS = np.clip(np.stack(ranges, 2), 0, length) + np.arange(batch)[:, None, None, None] * length
    for start, end in ((rows_BHCS[:, :, 0], rows_BHCS[:, :, 1]), (rows_BHCS[:, :, 2], rows_BHCS[:, :, 3])):
        empty = start >= end
        start[empty], end[empty] = _NEVER, _ALWAYS
    return rows_BHCS.transpose(1, 2, 0, 3).reshape(rows_BHCS.shape[1], 4, -1)


def _tile_bounds(ranges: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    inside = np.arange(COLUMN_TILE) < tiles[:, 1:2]
    tokens = np.where(inside, tiles[:, :1] + np.arange(COLUMN_TILE), 0)
    bounds = ranges[:, :, tokens]  # [Hm, 4, T, COLUMN_TILE]
    bounds[:, 0::2, ~inside], bounds[:, 1::2, ~inside] = _ALWAYS, _NEVER
    return np.ascontiguousarray(bounds.transpose(0, 2, 1, 3), np.int32)
