"""Section 2.6: which texts can become tokens, and what ranges stand for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.sections.vocabulary import MAX_ADDED_TOKENS, expand_range, expanded_tokens, token_problem
from tests.config.samples import load, problems

quick = settings(max_examples=100, deadline=None, derandomize=True)
around = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="{}"), max_size=5)


@quick
@given(around, around, st.integers(0, 50_000), st.integers(0, 200))
def test_a_range_stands_for_every_number_in_it(before: str, after: str, first: int, more: int) -> None:
    expanded = expand_range(f"{before}{{{first}..{first + more}}}{after}")
    assert expanded == [before + str(number) + after for number in range(first, first + more + 1)]
    assert len(set(expanded)) == more + 1


@quick
@given(st.text(st.sampled_from("{}.0123 ab"), max_size=14))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        assert expand_range(text)
    except ValueError as error:
        assert str(error)


def test_ids_follow_the_order_of_the_parameters() -> None:
    assert expanded_tokens(["<b>", "<a>"], ["<u{1..2}>", "<t{9..10}>"]) == [
        "<b>",
        "<a>",
        "<u1>",
        "<u2>",
        "<t9>",
        "<t10>",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|unit|>", "has no range"),
        ("<|unit{0-9}|>", "has no range"),
        ("<|{0..7}_{0..1023}|>", "more than one range"),
        ("<|unit{9..0}|>", "runs backwards, from 9 to 0"),
        ("<|unit{00..99}|>", "`00` is no number of a range"),
        ("<|unit{-1..9}|>", "`-1` is no number of a range"),
        ("<|unit{0..}|>", "`` is no number of a range"),
        ("<|unit{0..1e4}|>", "`1e4` is no number of a range"),
        ("<|unit{\u0660..\u0669}|>", "is no number of a range"),
        ("<|unit{0..500000}|>", "500,001 tokens are more than 500,000"),
        ("<|unit{0..99999999999999}|>", "is no number of a range"),
        (" <|unit{0..9}|>", "begins or ends with white space"),
        ("<|unit\n{0..9}|>", "U\\+000A, which is no printable character"),
    ],
)
def test_a_range_that_cannot_be_read_is_refused(text: str, reason: str) -> None:
    assert re.search(reason, problems(added_token_ranges=[text]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" a", "white space"),
        ("a\u3000", "white space"),
        ("   ", "white space"),
        ("a\x00b", "U+0000"),
        ("a\x1b[2J", "U+001B"),
        ("a\ud800", "U+D800, half of a character"),
        ("a\ufdd0", "U+FDD0"),
        ("a\uffff", "U+FFFF"),
        ("<|unit{0..9}|>", "is a range; write it into `added_token_ranges`"),
        ("x" * 201, "201 characters, more than 200"),
    ],
)
def test_a_text_that_can_be_no_token_is_refused(text: str, reason: str) -> None:
    message = problems(added_tokens=["<|a|>", text])
    assert "added_tokens" in message
    assert reason == "empty" or reason in message


@pytest.mark.parametrize("text", ["<|continue|>", "a b", "é", "\U0001f986", "{0}", "x" * 200, "\u2581a"])
def test_other_texts_can_be_tokens(text: str) -> None:
    assert token_problem(text) == "" and load(added_tokens=[text])["added_tokens"] == (text,)


def test_no_token_is_named_twice() -> None:
    assert "<|u1|>: named more than once" in problems(added_tokens=["<|u1|>"], added_token_ranges=["<|u{0..3}|>"])
    assert "<a>: named more than once" in problems(added_tokens=["<a>", "<b>", "<a>"])
    both = problems(added_token_ranges=["<|u{0..9}|>", "<|u{5..30}|>"])
    assert "<|u5|>, <|u6|>, <|u7|> and 2 more: named more than once" in both


def test_all_ranges_together_are_of_a_sane_size() -> None:
    half = MAX_ADDED_TOKENS // 2
    ranges = [f"<a{{0..{half - 1}}}>", f"<b{{0..{half}}}>"]
    assert "500,001 tokens are more than 500,000" in problems(added_token_ranges=ranges)


def test_what_has_no_effect_is_told() -> None:
    """Nothing is said of values that act, nor of those that the user has not written."""

    def told(**values: object) -> str:
        return "\n".join(load(**values).messages)

    tokens = {"added_tokens": ["<|a|>"]}
    assert "new_token_init" in told(new_token_init="mean")
    assert "new_token_init" not in told(new_token_init="mean", **tokens)
    assert "new_token_init" not in told(new_token_init="mean", added_token_ranges=["<|u{0..1}|>"])
    assert "train_added_tokens" in told(train_added_tokens=False, **tokens)
    assert "train_added_tokens" in told(train_added_tokens=False, lora=True)
    assert "train_added_tokens" not in told(train_added_tokens=False, lora=True, **tokens)
    assert "added" not in told(lora=True)
