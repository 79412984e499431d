"""The rewards of a configuration: their names, weights and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from erniekit.rewards.rewards import Answer, RewardError, Rewards, open_rewards
from tests.rewards.asking import answer, configured, opened


def scores(rewards: Rewards, *answers: Answer) -> list[list[float]]:
    found = rewards.score(answers)
    assert found.dtype == np.float64 and found.shape == (len(answers), len(rewards.names))
    return found.tolist()


@pytest.mark.proves("rewards")
def test_rewards_are_columns_in_their_order(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "integer"}))
    rewards = opened("exact_match", "numeric", "digits=regex:^\\d+$", f"json_schema:{schema}", "length:1-2")
    assert rewards.names == ("exact_match", "numeric", "digits", "json_schema", "length")
    assert rewards.weights.tolist() == [1] * 5
    found = scores(rewards, answer("5", answer="5"), answer("It is 5", 2, answer="5"))
    assert found == [[1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert scores(rewards) == []
    rewards.close()


@pytest.mark.proves("reward_weights")
def test_weights_are_those_that_are_written() -> None:
    rewards = opened("exact_match", "length:9", reward_weights=[1, -0.5])
    assert rewards.weights.tolist() == [1, -0.5] and rewards.weights.dtype == np.float64


@pytest.mark.proves("reference_field")
def test_ranks_that_do_not_score_hold_neither_processes_nor_models() -> None:
    declared = configured("exact_match", "python:no_such_module.score", "reward_model:no-such-folder")
    rewards = open_rewards(declared, scores=False)
    assert rewards.names == ("exact_match", "score", "reward_model") and rewards.weights.tolist() == [1, 1, 1]
    with pytest.raises(AssertionError):
        rewards.score([answer("5")])
    rewards.close()
    weighted = open_rewards(configured("exact_match", "length:9", reward_weights=[1, -0.5]), scores=False)
    assert weighted.weights.tolist() == [1, -0.5]


def test_the_reference_stands_in_the_field_that_is_named() -> None:
    record = {"answer": "5", "truth": "6"}
    assert scores(opened("exact_match"), answer("6", **record)) == [[0]]
    assert scores(opened("exact_match", "numeric", reference_field="truth"), answer("6", **record)) == [[1, 1]]


def test_a_record_without_reference_is_named() -> None:
    with pytest.raises(
        RewardError, match=r"reward exact_match: data.jsonl:3: .* no reference answer(?s:.)*reference_field"
    ):
        opened("exact_match").score([answer("5", 2, answer="5"), answer("5", 3)])


def test_a_schema_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward shape: .*missing\.json"):
        opened(f"shape=json_schema:{tmp_path}/missing.json")
