"""Score generated answers against expected ones: exact match, ROUGE and BLEU, error rates, as running sums."""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from erniekit.build.checks import scoring_libraries_missing
from erniekit.errors import ConfigurationError
from erniekit.inference.error_rates import ErrorRates

ROUGE = ("rouge1", "rouge2", "rougeL")
BLEU_ORDER = 4
# Ideographs (with extensions and compatibility forms), kana and bopomofo, which have no spaces between words.
_WITHOUT_SPACES = (
    "\u3005-\u3007\u3041-\u30ff\u3105-\u312f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_TOKEN = re.compile(f"[{_WITHOUT_SPACES}]|[^\\W_{_WITHOUT_SPACES}]+")


@dataclass
class BleuCounts:
    """The counts from which corpus BLEU is computed, summed over answers."""

    matches: list[int] = field(default_factory=lambda: [0] * BLEU_ORDER)  # n-grams of the answers also expected
    ngrams: list[int] = field(default_factory=lambda: [0] * BLEU_ORDER)  # n-grams of the answers
    answer_tokens: int = 0
    expected_tokens: int = 0

    def add(self, matches: Iterable[int], ngrams: Iterable[int], answer_tokens: int, expected_tokens: int) -> None:
        self.matches = [mine + new for mine, new in zip(self.matches, matches, strict=True)]
        self.ngrams = [mine + new for mine, new in zip(self.ngrams, ngrams, strict=True)]
        self.answer_tokens += answer_tokens
        self.expected_tokens += expected_tokens


class TextOverlap:
    """Running ROUGE and BLEU over any number of answers, in constant memory.

    - `rouge1`, `rouge2`, `rougeL`: the mean F-measure (Lin, 2004) over answers, from 0 to 1, by `rouge-score`. Tokens
      are lower-case words and numbers as in that library, and single characters in scripts without spaces.
    - `bleu`: corpus BLEU (Papineni et al., 2002) from 0 to 100, by `sacrebleu` with its tokenizer `zh`, which tokenizes
      ASCII text like its default `13a`, and splits ideographs. Two differences: entities such as `&amp;`, and a period
      or comma between a digit and the end of the text, which `zh` leaves with the digit ("42."). If no answer has 4
      tokens, the longest existing n-gram is used.

    Raises:
        ConfigurationError: a library is not installed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sums = dict.fromkeys(ROUGE, 0.0)
        self._counts = BleuCounts()
        self._rouge = _library("rouge_score.rouge_scorer").RougeScorer(list(ROUGE), tokenizer=_WordsAndCharacters())
        self._bleu = _library("sacrebleu.metrics").BLEU(tokenize="zh", effective_order=True, max_ngram_order=BLEU_ORDER)

    def add(self, expected: str, answer: str) -> dict[str, float]:
        """Add an answer to the sums, and return its own scores."""
        scores = {name: score.fmeasure for name, score in self._rouge.score(expected, answer).items()}
        for name, value in scores.items():
            self._sums[name] += value
        bleu = self._bleu.sentence_score(answer, [expected])
        self._counts.add(bleu.counts, bleu.totals, bleu.sys_len, bleu.ref_len)
        self.count += 1
        _clear_tokenizer_caches(self._bleu.tokenizer)
        return scores | {"bleu": bleu.score}

    def merge(self, other: TextOverlap) -> None:
        """Add all answers of `other`, as if each had been added here."""
        self.count += other.count
        for name, value in other._sums.items():
            self._sums[name] += value
        counts = other._counts
        self._counts.add(counts.matches, counts.ngrams, counts.answer_tokens, counts.expected_tokens)

    def metrics(self) -> dict[str, float]:
        """Return the scores over all answers; empty if there is none."""
        if not self.count:
            return {}
        counts = self._counts
        bleu = self._bleu.compute_bleu(
            list(counts.matches),
            list(counts.ngrams),
            counts.answer_tokens,
            counts.expected_tokens,
            smooth_method="exp",
            effective_order=True,
        )
        return {name: value / self.count for name, value in self._sums.items()} | {"bleu": bleu.score}


class AnswerScores:
    """Running scores over any number of answers, in constant memory.

    - `exact_match`: the share of answers that equal the expected text after stripping white space at both ends.
    - the metrics of `TextOverlap` over the answers that are no transcripts;
    - the metrics of `ErrorRates` over the answers to recordings.

    Args:
        normalizer: of the error rates: a value of `text_normalizer`.

    Raises:
        ConfigurationError: at the first answer, if a library that scores it is not installed.
    """

    def __init__(self, normalizer: str = "none") -> None:
        self.count = self._exact = 0
        self._normalizer = normalizer
        self._overlap: TextOverlap | None = None
        self._errors: ErrorRates | None = None

    def add(
        self, expected: str, answer: str, *, is_transcript: bool = False, has_recordings: bool = False
    ) -> dict[str, float]:
        """Add an answer to the sums.

        Args:
            is_transcript: it is expected to be the transcript of a recording.
            has_recordings: the question has recordings, of which the answer may be a transcript.

        Returns:
            The scores of this answer alone, under the names of `metrics`.
        """
        exact = answer.strip() == expected.strip()
        self._exact += exact
        self.count += 1
        scores = {"exact_match": float(exact)}
        if not is_transcript:
            self._overlap = self._overlap or TextOverlap()
            scores |= self._overlap.add(expected, answer)
        if is_transcript or has_recordings:
            self._errors = self._errors or ErrorRates(self._normalizer)
            scores |= self._errors.add(expected, answer)
        return scores

    def merge(self, other: AnswerScores) -> None:
        """Add all answers of `other`, as if each had been added here."""
        self.count += other.count
        self._exact += other._exact
        if other._overlap:
            self._overlap = self._overlap or TextOverlap()
            self._overlap.merge(other._overlap)
        if other._errors:
            self._errors = self._errors or ErrorRates(self._normalizer)
            self._errors.merge(other._errors)

    def metrics(self) -> dict[str, float]:
        """Return the scores over all answers; empty if there is none."""
        if not self.count:
            return {}
        metrics = {"exact_match": self._exact / self.count}
        for part in (self._overlap, self._errors):
            metrics |= part.metrics() if part else {}
        return metrics


def check_libraries(*, overlap: bool, transcripts: bool) -> None:
    """Raise ConfigurationError if a library that scores such answers is not installed."""
    if overlap:
        TextOverlap()
    if transcripts:
        ErrorRates()


def merge_scores(parts: Mapping[str, AnswerScores]) -> AnswerScores:
    """Return the scores over the answers of all sources."""
    merged = AnswerScores()
    for part in parts.values():
        merged.merge(part)
    return merged


def words_and_characters(text: str) -> list[str]:
    """Split a text into lower-case words and numbers, and into single characters in scripts without spaces.

    On ASCII text these are the tokens of `rouge-score`, whose own tokenizer drops every other character.
    """
    return _TOKEN.findall(unicodedata.normalize("NFC", text).lower())


class _WordsAndCharacters:
    """A tokenizer with the interface that `rouge-score` expects."""

    def tokenize(self, text: str) -> list[str]:
        return words_and_characters(text)


def _clear_tokenizer_caches(tokenizer: Any) -> None:
    """Empty sacrebleu's caches, which keep the last 65,536 texts of each of its tokenizers."""
    for part in (tokenizer, *vars(tokenizer).values()):
        clear = getattr(vars(type(part)).get("__call__"), "cache_clear", None)
        if clear is not None:
            clear()


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(scoring_libraries_missing(str(error))) from None
