"""Word and character error rates of transcripts, as running sums; the edits are counted by `jiwer`."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from erniekit.build.checks import transcript_libraries_missing
from erniekit.errors import ConfigurationError
from erniekit.inference.normalizers import text_normalizer

ERROR_RATES = ("wer", "cer", "substitutions", "deletions", "insertions")  # shares of words, and of characters


@dataclass
class EditCounts:
    """The edits that make expected texts out of transcribed ones, by the shortest way (Levenshtein, 1966).

    Attributes:
        units: the words, or characters, of the expected texts.
        substitutions, deletions, insertions: units that were transcribed as others, left out, and added.
    """

    units: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @classmethod
    def of(cls, alignment: Any) -> EditCounts:
        """Return the counts of an alignment of jiwer's."""
        substitutions, deletions = alignment.substitutions, alignment.deletions
        return cls(alignment.hits + substitutions + deletions, substitutions, deletions, alignment.insertions)

    def add(self, other: EditCounts) -> None:
        self.units += other.units
        self.substitutions += other.substitutions
        self.deletions += other.deletions
        self.insertions += other.insertions

    @property
    def rate(self) -> float:
        """Edits per unit: 0 is perfect, and insertions can make it greater than 1. Where nothing is expected it is the
        number of insertions, as jiwer has it."""
        return (self.substitutions + self.deletions + self.insertions) / (self.units or 1)


class ErrorRates:
    """Running error rates over any number of transcripts, in constant memory.

    - `wer`: the edits in words over the words of all expected texts; words stand between spaces. `substitutions`,
      `deletions` and `insertions` are its three parts, and `reference_words` that number of words.
    - `cer`: the same of characters, spaces between words included.
    - `empty_references`: expected texts without a word, after normalisation too, if there are any. All words that are
      transcribed there are insertions.

    They equal jiwer's on the list of all normalised pairs.

    Args:
        normalizer: a value of `text_normalizer`, which is applied to both texts.

    Raises:
        ConfigurationError: jiwer is not installed.
    """

    def __init__(self, normalizer: str = "none") -> None:
        self._normalize = text_normalizer(normalizer)
        self._jiwer = _jiwer()
        self.count = self._empty = 0
        self._words, self._characters = EditCounts(), EditCounts()

    def add(self, expected: str, answer: str) -> dict[str, float]:
        """Add a transcript to the sums, and return its own `wer` and `cer`."""
        expected, answer = self._normalize(expected), self._normalize(answer)
        words = EditCounts.of(self._jiwer.process_words(expected, answer))
        characters = EditCounts.of(self._jiwer.process_characters(expected, answer))
        self._words.add(words)
        self._characters.add(characters)
        self._empty += not words.units
        self.count += 1
        return {"wer": words.rate, "cer": characters.rate}

    def merge(self, other: ErrorRates) -> None:
        """Add all transcripts of `other`, as if each had been added here."""
        self.count += other.count
        self._empty += other._empty
        self._words.add(other._words)
        self._characters.add(other._characters)

    def metrics(self) -> dict[str, float]:
        """Return the rates over all transcripts; empty if there is none."""
        if not self.count:
            return {}
        words = self._words
        parts = {name: getattr(words, name) / (words.units or 1) for name in ERROR_RATES[2:]}
        empty = {"empty_references": float(self._empty)} if self._empty else {}
        rates = {"wer": words.rate, "cer": self._characters.rate}
        return rates | parts | {"reference_words": float(words.units)} | empty


def _jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError as error:
        raise ConfigurationError(transcript_libraries_missing(str(error))) from None
    return jiwer
