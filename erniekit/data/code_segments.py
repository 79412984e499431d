"""Join texts and frames to the sequence of a sample that is written level by level, and write down what is predicted.

Shapes: L levels, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from erniekit.data.batch import CodePart
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample


class Segment(NamedTuple):
    """A stretch of a sample: tokens or frames.

    Attributes:
        ids: int32[k]; 0 for frames.
        rows: int64[k, L], of the code tables; -1 for tokens.
    """

    ids: np.ndarray
    rows: np.ndarray


def of_tokens(ids: Sequence[int], levels: int) -> Segment:
    """Return the segment of some tokens."""
    return Segment(np.array(ids, np.int32), np.full((len(ids), levels), -1, np.int64))


def of_frames(codes: np.ndarray, tables: Sequence[int], levels: int) -> Segment:
    """Return the segment of frames that read codes; arguments as of `frame_rows`."""
    rows = frame_rows(codes, tables, levels)
    return Segment(np.zeros(len(rows), np.int32), rows)


def frame_rows(codes: np.ndarray, tables: Sequence[int], levels: int) -> np.ndarray:
    """Return the rows int64[T, L] that frames read; -1 for the levels above those of the codes.

    Args:
        codes: int[l, T].
        tables: the first row of the table of each level; at least l.
    """
    rows = np.full((codes.shape[1], levels), -1, np.int64)
    rows[:, : len(codes)] = codes.T + np.array(tables[: len(codes)], np.int64)
    return rows


class Assembly:
    """Segments joined by separators, each of which belongs to the segment before it.

    Args:
        separator: the token.
        restarts_positions: positions count from 0 in each segment with its separator.

    Attributes:
        starts: where each segment begins.
    """

    def __init__(self, segments: Sequence[Segment], separator: int, *, restarts_positions: bool) -> None:
        levels = segments[0].rows.shape[1]
        between = of_tokens([separator], levels)
        parts = [part for segment in segments for part in (segment, between)][:-1]
        lengths = np.array([len(segment.ids) + 1 for segment in segments])  # with their separators
        lengths[-1] -= 1
        self.starts: list[int] = (np.cumsum(lengths) - lengths).tolist()
        self._ids = np.concatenate([part.ids for part in parts])
        self._labels = np.full(len(self._ids), IGNORE_INDEX, np.int32)
        rows = np.concatenate([part.rows for part in parts])
        self._arrays = {
            "codes": rows,
            "code_labels": np.full_like(rows, IGNORE_INDEX),
            "code_part": np.full(len(rows), CodePart.NONE, np.int8),
        }
        if restarts_positions:
            self._arrays["position_ids"] = np.concatenate([np.arange(length) for length in lengths.tolist()])

    def predict_codes(self, first: int, codes: np.ndarray, level: int, part: CodePart) -> None:
        """Let the positions from `first` on predict these codes of a level."""
        self._arrays["code_labels"][first : first + len(codes), level] = codes
        self._arrays["code_part"][first : first + len(codes)] = part

    def predict_tokens(self, first: int, ids: list[int], part: CodePart) -> None:
        """Let the positions from `first` on predict these tokens."""
        self._labels[first : first + len(ids)] = ids
        self._arrays["code_part"][first : first + len(ids)] = part

    def finished(self, *, causal: bool, seconds: float) -> Sample:
        return Sample(self._ids, self._labels, arrays=self._arrays, causal=causal, seconds=seconds)
