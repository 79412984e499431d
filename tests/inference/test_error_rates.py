"""Error rates of transcripts: those of jiwer over the corpus, and by hand."""

from __future__ import annotations

import random

import jiwer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.inference.error_rates import ErrorRates

TEXTS = st.text(st.sampled_from("ab  c\n.北京"), max_size=20)


def rates(pairs: list[tuple[str, str]], normalizer: str = "none") -> ErrorRates:
    found = ErrorRates(normalizer)
    for expected, answer in pairs:
        found.add(expected, answer)
    return found


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6))
def test_rates_are_those_of_jiwer_over_the_corpus(pairs: list[tuple[str, str]]) -> None:
    metrics = rates(pairs).metrics()
    expected, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    words = jiwer.process_words(expected, answers)
    assert metrics["wer"] == words.wer
    assert metrics["cer"] == jiwer.cer(expected, answers)
    units = metrics["reference_words"] or 1
    assert [metrics[name] * units for name in ("substitutions", "deletions", "insertions")] == pytest.approx(
        [words.substitutions, words.deletions, words.insertions]
    )


def test_by_hand() -> None:
    found = ErrorRates()
    assert found.metrics() == {}
    assert found.add("one two three", "one four three five") == {
        "wer": pytest.approx(2 / 3),
        "cer": pytest.approx(9 / 13),
    }
    assert found.add("six", "six") == {"wer": 0, "cer": 0}
    metrics = found.metrics()
    assert metrics["wer"] == pytest.approx(2 / 4)
    assert (metrics["substitutions"], metrics["deletions"], metrics["insertions"]) == (1 / 4, 0, 1 / 4)


def test_more_than_everything_may_be_wrong() -> None:
    assert rates([("yes", "no no no")]).metrics()["wer"] == 3


def test_an_empty_reference_counts_what_is_heard_there() -> None:
    assert rates([("", "two words"), ("one two", "one two")]).metrics() == {
        "wer": 1.0, "cer": 9 / 7, "substitutions": 0.0, "deletions": 0.0, "insertions": 1.0, "reference_words": 2.0,
        "empty_references": 1.0,
    }  # fmt: skip
    assert rates([("[noise]", "hm")], "basic").metrics()["wer"] == 1.0  # jiwer's number of insertions
    assert rates([("", "")]).metrics()["wer"] == 0.0


@pytest.mark.parametrize(
    ("normalizer", "pair"),
    [("basic", ("Hello, World", "hello world")), ("english", ("it's twenty", "It is 20.")),
     ("chinese", ("今天 天气，好", "今天天气好。"))],
)  # fmt: skip
def test_both_texts_are_normalised(normalizer: str, pair: tuple[str, str]) -> None:
    assert rates([pair]).metrics()["cer"] > 0
    assert rates([pair], normalizer).metrics()["cer"] == rates([pair], normalizer).metrics()["wer"] == 0


def test_parts_make_the_whole() -> None:
    draw = random.Random(3)
    pairs = [(" ".join(draw.choices("abcd", k=5)), " ".join(draw.choices("abcd", k=5))) for _ in range(40)]
    whole = rates(pairs).metrics()
    merged = rates(pairs[:7])
    merged.merge(rates(pairs[7:]))
    assert merged.metrics() == whole and merged.count == 40
