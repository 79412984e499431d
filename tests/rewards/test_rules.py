"""The rules by which one answer is scored."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.rewards import rules


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("42", "42", 1), (" 42\n", "42", 1), ("<think>41?</think>\n42", "42", 1), ("42.", "42", 0), ("", "42", 0),
        ("b", ["a", "b"], 1), ("c", ["a", "b"], 0), ("四十二", "四十二", 1),
    ],
)  # fmt: skip
def test_exact_match(text: str, reference: str | list[str], expected: float) -> None:
    assert rules.exact_match(text, reference) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42), ("2 + 3 = 5", 5), ("-7", -7), ("3-4", 4), ("\u22127", -7),
        ("1,234,567.5", "1234567.5"),
        ("1,2,3", 3), ("1/2", "1/2"), (r"\frac{3}{4}", "3/4"), (r"-\dfrac{3}{4}", "-3/4"), ("0.5", "1/2"),
        (".5", "1/2"), ("答案是42元", 42),
        ("1e3", 1000), ("1.5e-2", "3/200"), (r"so \boxed{12} as 3 x 4", 12), (r"\boxed{\frac{1}{3}}", "1/3"),
        ("12 apples, 3 left\n#### 9 of 10 kg", 10), ("#### 9", 9), ("none", None), ("", None), ("1/0", None),
        (r"\boxed{7", 7), ("7" * 401, None), ("version v2", 2),
    ],
)  # fmt: skip
def test_the_number_of_a_text(text: str, number: object) -> None:
    assert rules.number_of(text) == (None if number is None else Fraction(str(number)))


def test_numbers_are_compared_as_fractions_up_to_a_relative_error() -> None:
    assert rules.numeric("It is 1/2", "0.5") == 1
    assert rules.numeric("It is 0.333", "1/3") == 0
    assert rules.numeric("It is 0.333", "1/3", tolerance=0.01) == 1
    assert rules.numeric("I do not know", "7") == 0
    assert rules.numeric("8", ["7", "8"]) == 1
    assert rules.numeric("<think>9</think> I think 7", "steps\n#### 7") == 1
    with pytest.raises(ValueError, match="no number in the reference answer 'seven'"):
        rules.numeric("7", "seven")


@given(st.text(max_size=60))
def test_the_number_of_any_text_is_one_or_none(text: str) -> None:
    found = rules.number_of(text)
    assert found is None or isinstance(found, Fraction)


@given(st.fractions(), st.sampled_from(["{}", "It is {}.", "#### {}", r"\boxed{{{}}}", "9 and {}"]))
def test_a_fraction_is_found_as_it_is_written(number: Fraction, form: str) -> None:
    assert rules.number_of(form.format(number)) == number


def test_a_pattern_is_found_anywhere_and_in_thoughts() -> None:
    assert rules.regex("<think>a</think>b", re.compile("^<think>.*</think>")) == 1
    assert rules.regex("b", re.compile("^<think>.*</think>")) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"answer": 5}', 1), ('<think>hm</think> {"answer": 5}', 1), ('```json\n{"answer": 5}\n```', 1),
        ('It is\n```\n{"answer": 5}\n```', 1), ('{"answer": "5"}', 0), ('{"answer": 5} so', 0), ("{}", 0), ("", 0),
        ('{"answer": NaN}', 0), ("[" * 100_000, 0), ('```\n{"answer": 5}\n```\n```\n{"answer": 5}\n```', 0),
    ],
)  # fmt: skip
def test_json_of_a_schema(text: str, expected: float) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    assert rules.json_schema(text, rules.schema_validator(schema)) == expected


def test_a_schema_is_not_fetched_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("asked a network"))
    validator = rules.schema_validator({"$ref": "https://example.org/answer.json"})
    with pytest.raises(Exception, match=r"Unresolvable: https://example\.org/answer\.json"):
        rules.json_schema("{}", validator)
    own = rules.schema_validator({"$defs": {"whole": {"type": "integer"}}, "items": {"$ref": "#/$defs/whole"}})
    assert [rules.json_schema(text, own) for text in ("[1]", '["1"]')] == [1.0, 0.0]


def test_what_is_no_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="'whole' is not valid"):
        rules.schema_validator({"type": "whole"})


@pytest.mark.parametrize(
    ("characters", "expected"), [(0, 0), (5, 0.5), (10, 1), (40, 1), (50, 0.75), (80, 0), (1000, 0)]
)
def test_length_is_1_inside_and_falls_outside(characters: int, expected: float) -> None:
    assert rules.length(" " + "a" * characters, 10, 40) == expected


@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 200))
def test_length_is_from_0_to_1_and_1_only_inside(characters: int, fewest: int, more: int) -> None:
    value = rules.length("a" * characters, fewest, fewest + more)
    assert 0 <= value <= 1
    assert (value == 1) == (fewest <= characters <= fewest + more)
