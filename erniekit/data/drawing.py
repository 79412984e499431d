"""Samples that are drawn anew in each epoch: what the plan, the dataset and other ranks ask of a source of them.

What a draw decides is a function of (seed, epoch, source, record), so workers, ranks and resuming change nothing, and
the lengths of an epoch are known before it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from erniekit.data.templates.ernie import Sample

if TYPE_CHECKING:
    from erniekit.data.code_reader import CodeReader
    from erniekit.data.token_cache import TokenArrays


class EpochLengths(NamedTuple):
    """The lengths of the samples of an epoch.

    Attributes:
        positions: int32[n]; 0 for a sample that is left out.
        left_out, shortened: how many samples were longer than `max_seq_len`.
    """

    positions: np.ndarray
    left_out: int
    shortened: int


class EpochSource(Protocol):
    """The samples of one source, which differ from epoch to epoch."""

    @property
    def longest(self) -> np.ndarray:
        """int64[n], the positions that each sample has at most in any epoch."""
        ...

    def lengths(self, epoch: int) -> EpochLengths:
        """Return the lengths of all samples in an epoch."""
        ...

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample as it is in an epoch; it has no position if it is left out."""
        ...


class Drawing(Protocol):
    """How the records of a kind become samples. `Interleaving`, `MaskedCodes` and `ArNarCodes` are of this form."""

    @property
    def kind(self) -> str:
        """The kind of records: "aligned_units" or "codes"."""
        ...

    @property
    def fingerprint(self) -> tuple:
        """What determines the samples of an epoch, beside the key of the token cache."""
        ...

    @property
    def levels(self) -> int:
        """The levels of the codes in a batch, C; 0 where there are none."""
        ...

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the further arrays that samples have (`data.batch.ARRAY_SPECS`)."""
        ...

    def stored(self) -> list:
        """Return it as JSON, for ranks without data."""
        ...

    def source(self, arrays: TokenArrays, number: int, reader: CodeReader | None) -> EpochSource:
        """Return the samples of a source.

        Args:
            number: of the source, which makes its streams of draws.
            reader: of its codes; None on ranks that only plan.
        """
        ...


# Of the samples of recordings as codes.

CHOICES = 16  # uniform numbers that decide about a recording in an epoch, apart from masks
BLOCK = 1 << 16  # recordings whose numbers are in memory at once
MAX_CACHED_EPOCHS = 2  # whose lengths a source keeps
SPOKEN_NUMBERS = 12  # of each recording, in `TokenArrays.spoken`


class SpokenFacts(NamedTuple):
    """What the token cache says of the recordings of a source, apart from where their codes lie.

    Attributes:
        text, pinyin, language, instruct: int32[n], the number of their tokens; `input_ids` has them in this order.
        frames: int32[n].
        clean_start: int32[n], the first frame that is not a noisy prompt; -1 where a recording has none.
        speaker: int32[n].
        milliseconds: int32[n].
    """

    text: np.ndarray
    pinyin: np.ndarray
    language: np.ndarray
    instruct: np.ndarray
    frames: np.ndarray
    clean_start: np.ndarray
    speaker: np.ndarray
    milliseconds: np.ndarray

    @classmethod
    def of(cls, spoken: np.ndarray) -> SpokenFacts:
        """Copy the numbers of `TokenArrays.spoken`: these, but file, offset (two) and item size before the last."""
        table = spoken.reshape(-1, SPOKEN_NUMBERS).astype(np.int32).T
        return cls(*map(np.ascontiguousarray, (*table[:7], table[-1])))


def lengths_by_blocks(count: int, positions: Callable[[int, int], np.ndarray], max_seq_len: int) -> EpochLengths:
    """Return the lengths of the samples of an epoch; those that are longer than `max_seq_len` are left out.

    Args:
        count: n.
        positions: of samples start <= i < stop: int[stop - start].
    """
    found = np.zeros(count, np.int32)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        lengths = positions(start, stop)
        found[start:stop] = np.where(lengths <= max_seq_len, lengths, 0)
    return EpochLengths(found, int(np.count_nonzero(found == 0)), 0)


def tuples_of(value: Any) -> Any:
    """Return JSON with tuples in the place of lists."""
    return tuple(map(tuples_of, value)) if isinstance(value, list | tuple) else value
