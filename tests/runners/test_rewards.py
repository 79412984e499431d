"""`erniekit rewards`: rewards are tried on reference answers, or on answers from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.config import Config
from erniekit.errors import ConfigurationError, DataError
from erniekit.runners.rewards import needs_paddle, score_answers, table
from tests.rewards.asking import GIVEN


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions with answers, one of them wrong."""
    records = [
        {"messages": [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}]},
        {"messages": [{"role": "user", "content": "4 + 4"}], "answer": "8"},
        {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2"},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def configured(data: Path, *rewards: str, **values: Any) -> Config:
    given = {**GIVEN, "train_dataset_path": str(data), "rewards": list(rewards), **values}
    return Config.from_mapping(given, verb="preview")


def test_reference_answers_are_scored(data: Path) -> None:
    scored = score_answers(configured(data, "exact_match", "length:2", reward_weights=[1, 2]))
    assert [answer.text for answer in scored.answers] == ["5", "8", "2"]
    assert scored.scores.tolist() == [[1, 1]] * 3 and scored.rewards.tolist() == [3] * 3
    assert len(score_answers(configured(data, "exact_match"), count=2).answers) == 2
    shown = table(score_answers(configured(data, "exact_match", "length:2", reward_weights=[1, 0.1])), 3)
    assert ["deviation", "0", "0", "0"] in [line.split() for line in shown.splitlines()]
    assert next(scored.lines()) == {
        "place": f"{data}:1", "answer": "5", "rewards": {"exact_match": 1.0, "length": 1.0}, "reward": 3.0,
    }  # fmt: skip


def test_answers_are_matched_by_place_or_prompt(data: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    rows = [
        {"place": f"{data}:2", "answer": "8", "messages": []},
        {"place": f"{data}:2", "answer": "9"},
        {"prompt": "1 + 1", "answer": "2"},
        {"prompt": "2 + 3", "messages": [{"role": "user", "content": "2 + 3"}], "answer": "6"},
    ]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = score_answers(configured(data, "exact_match"), answers)
    assert scored.scores.ravel().tolist() == [1, 0, 1, 0]
    shown = table(scored, 2)
    assert "data.jsonl:2         1            1  '8'" in shown and "... and 2 more" in shown
    assert ["mean", "0.5", "0.5"] in [line.split() for line in shown.splitlines()] and "4 answers scored in" in shown
    assert "the same for all answers" not in shown


def test_what_is_the_same_for_all_is_told(data: Path, tmp_path: Path) -> None:
    config = configured(data, "exact_match", "short=length:1-3")
    assert "the same for all" not in table(score_answers(config), 10)  # reference answers are all right
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "2 + 3", "answer": "4"}\n')
    assert "the same for all answers: short;" in table(score_answers(config, answers), 10)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"answer": "5", "prompt": "9 + 9"}', "answers.jsonl:1: the data .* has no record of the prompt '9 [+] 9'"),
        ('{"answer": "5", "place": "x:1"}', "has no record of the place x:1"),
        ('{"answer": 5, "prompt": "2 + 3"}', "answers.jsonl:1: expected an object with a text as `answer`"),
        ("[1]", "expected an object"), ("{", "answers.jsonl"), ("", "answers.jsonl"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_scored_are_told(line: str, told: str, data: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(line)
    with pytest.raises(DataError, match=told):
        score_answers(configured(data, "exact_match"), answers)


def test_without_reference_answers_or_rewards_it_says_what_to_do(data: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none is declared\n  Write which"):
        score_answers(configured(data))
    with pytest.raises(ConfigurationError, match="stage SFT has no rewards"):
        score_answers(configured(data, "exact_match", stage="SFT"))
    with pytest.raises(DataError, match=r"data.jsonl:1: the record has no field `truth`(?s:.)*--answers FILE"):
        score_answers(configured(data, "length:5", reference_field="truth"))
    data.write_text('{"messages": 3}\n')
    with pytest.raises(DataError, match=r"data.jsonl:1"):
        score_answers(configured(data, "exact_match"))


def test_the_verb_prints_a_table_or_lines(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        f"stage: GRPO\ntrain_dataset_path: {data}\nmodel_name_or_path: {tmp_path}\nrewards: [exact_match]\n"
    )
    assert main(["rewards", str(file)]) == 0
    assert "exact_match" in (out := capsys.readouterr().out) and "3 answers scored" in out
    assert main(["rewards", str(file), "rewards=[length:1]", "--json", "--count", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == {"length": 1.0}
    assert main(["rewards", str(file), f"rewards=['python:{tmp_path}/none.py:f']"]) == 2
    assert "none.py" in capsys.readouterr().err


def test_only_reward_models_need_paddle(data: Path) -> None:
    assert not needs_paddle(configured(data, "exact_match"))
    assert needs_paddle(configured(data, "exact_match", "reward_model:somewhere"))
