"""Section 2.13: how rewards are written, and what is refused."""

from __future__ import annotations

import re

import pytest

from erniekit.config.sections.rewards import KINDS, DeclaredReward, files_of, read_reward
from tests.config.samples import load, problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact_match", ("exact_match", "exact_match", "")),
        ("right=exact_match", ("right", "exact_match", "")),
        ("numeric:0.01", ("numeric", "numeric", "0.01")),
        (" regex: a=b ", ("regex", "regex", "a=b")),
        ("form=regex:^a:b=c", ("form", "regex", "^a:b=c")),
        ("length:20-400", ("length", "length", "20-400")),
        ("json_schema:a/b.json", ("json_schema", "json_schema", "a/b.json")),
        ("python:a.b.score", ("score", "python", "a.b.score")),
        ("python:a/b c.py:score", ("score", "python", "a/b c.py:score")),
        ("mine=python:~/a.py:score", ("mine", "python", "~/a.py:score")),
    ],
)
def test_a_reward_is_a_kind_with_an_argument_and_a_name(text: str, expected: tuple[str, str, str]) -> None:
    assert read_reward(text) == DeclaredReward(*expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_every_kind_is_one(kind: str) -> None:
    assert read_reward(KINDS[kind].example).kind == kind


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("accuracy", "`accuracy` is no reward; write one of exact_match, numeric"), ("", "is no reward"),
        ("exact_match:1", "exact_match takes no argument; write `exact_match`"),
        ("regex", "regex needs a regular expression; write it behind a colon, as in `regex:"),
        ("length:", "length needs the fewest and the most characters"),
        ("length:9-3", "are two whole numbers, the smaller one first, as in `length:20-400`"),
        ("length:0", "two whole numbers"), ("length:-5", "two whole numbers"), ("length:1.5", "two whole numbers"),
        ("numeric:x", "is a number from 0 and below 1"), ("numeric:nan", "is a number from 0"),
        ("numeric:1", "is a number from 0"), ("regex:(", "a regular expression cannot be read: "),
        ("python:score", "as MODULE.FUNCTION or FILE.py:FUNCTION, as in `python:my_rewards.score` or"),
        ("python:a.py:", "MODULE.FUNCTION"), ("python:a b.c", "MODULE.FUNCTION"),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_refused_with_an_example(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        read_reward(text)
    if text:
        assert f"`rewards`: `{text}`" in problems(stage="GRPO", rewards=["numeric", text])
    assert files_of([text]) == []


def test_names_differ_and_weights_are_as_many() -> None:
    assert "two rewards are called length; write a name in front of one" in problems(
        stage="GRPO", rewards=["length:9", "length:5"]
    )
    assert "1 weights for 2 rewards (length, more)" in problems(
        stage="GRPO", rewards=["length:9", "more=length:5"], reward_weights=[1]
    )
    assert "are all 0" in problems(stage="GRPO", rewards=["length:9"], reward_weights=[0])
    assert "`rewards`: is required and not set" in problems(stage="GRPO")
    assert load(stage="GRPO", rewards="exact_match, length:5").rewards.rewards == ("exact_match", "length:5")
    assert "has no effect with stage SFT" in "".join(load(rewards=["numeric"]).messages)


def test_limits_and_fields_that_nothing_reads_are_told() -> None:
    told = load(
        stage="GRPO", rewards=["length:9"], reference_field="x", reward_time_limit=5, reward_memory_limit=1
    ).messages
    assert len([line for line in told if "has no effect because none of the rewards is one of" in line]) == 3
    assert not load(
        stage="GRPO", rewards=["python:a.b"], reference_field="x", reward_time_limit=5, reward_memory_limit=1
    ).messages


def test_the_files_of_rewards_are_known() -> None:
    assert files_of(["json_schema:a.json", "python:b.py:f", "python:c.f", "length:3"]) == ["a.json", "b.py"]
