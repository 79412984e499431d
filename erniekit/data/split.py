"""Hold records of the training data out of training, for evaluation.

The records of a file are cut into stretches of 1 / fraction, and of each stretch one is held out, drawn by the seed.
Whether a record is held out depends on nothing but its number in the file, so that a file is read as a stream, every
rank finds the same records, and records that are added at the end of a file leave the others where they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple, TypeVar

from erniekit.data.conversation import Source
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import read_records
from erniekit.data.formats.unused_fields import UnusedFields

Numbered = TypeVar("Numbered")


class Split(NamedTuple):
    """One of the two parts of a file.

    Attributes:
        fraction: of the records that are held out, above 0 and below 1.
        seed: draws them.
        held_out: whether this is the part for evaluation; otherwise that for training.
    """

    fraction: float
    seed: int
    held_out: bool

    def takes(self, number: int) -> bool:
        """Return whether the record with this number, from 0, is in this part."""
        held, of = Fraction(repr(self.fraction)).as_integer_ratio()  # exact: 0.1 is 1 of 10
        stretch = number * held // of
        first, after = -(-stretch * of // held), -(-(stretch + 1) * of // held)
        digest = hashlib.blake2b(f"{self.seed} {stretch}".encode(), digest_size=8).digest()
        return (number == first + int.from_bytes(digest, "big") % (after - first)) == self.held_out

    def __str__(self) -> str:
        return f"{self.fraction:.3g} of its records, held out" if self.held_out else "without the held-out records"


def read_part(source: Source, unused: UnusedFields | None = None) -> Iterator[tuple[int, Record] | RecordProblem]:
    """Yield (line, record) for every record of a source, and a problem for each malformed one; see `read_records`."""
    return own_records(read_records(source.path, source.kind, unused, source.media_dir), source.split)


def own_records(items: Iterable[Numbered | RecordProblem], split: Split | None) -> Iterator[Numbered | RecordProblem]:
    """Yield the records of a part, and of the problems those of its records and of the file as a whole.

    Args:
        items: the records and problems of a file, in order.
        split: None: the file is not divided.
    """
    number = 0
    for item in items:
        of_file = isinstance(item, RecordProblem) and not item.line
        if of_file or split is None or split.takes(number):
            yield item
        number += not of_file
