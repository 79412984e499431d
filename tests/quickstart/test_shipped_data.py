"""The shipped data is what its generator makes, its answers are right, and nothing held out is trained on."""

from __future__ import annotations

import calendar
import json
import math
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/data"


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("tool", ["make_data.py", "make_model.py"])
def test_shipped_files_are_the_generated_ones(tool: str) -> None:
    command = [sys.executable, str(ROOT / "tools/quickstart" / tool), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_no_held_out_prompt_is_trained_on() -> None:
    held_out = {record["src"][0] for record in records("sft-eval.jsonl")}
    for name in ("sft-train.jsonl", "preference-train.jsonl", "verdict-train.jsonl"):
        assert held_out.isdisjoint(prompt for record in records(name) for prompt in record["src"])
    texts = "\n".join(record["text"] for record in records("text-train.jsonl"))
    assert not any(prompt in texts for prompt in held_out)


def test_rejected_answers_differ_from_chosen_ones() -> None:
    for name in ("preference-train.jsonl", "preference-eval.jsonl"):
        for record in records(name):
            chosen, rejected = record["response"]
            assert record["sort"] == [1, 0] and chosen != rejected


def test_verdicts_are_on_right_and_on_wrong_answers() -> None:
    for name, of in (("verdict-train.jsonl", "sft-train.jsonl"), ("verdict-eval.jsonl", "sft-eval.jsonl")):
        right = {record["src"][0]: record["tgt"][0] for record in records(of) if len(record["src"]) == 1}
        found = [(right[record["src"][0]] == record["tgt"][0], record["label"]) for record in records(name)]
        assert all(is_right == label for is_right, label in found)
        assert 0.5 < sum(label for _, label in found) / len(found) < 0.7


METRES = {"km": 1000.0, "m": 1.0, "dm": 0.1, "cm": 0.01, "mm": 0.001}
OTHER_UNITS = {"kg": 1000.0, "g": 1.0, "l": 1.0, "ml": 0.001}
YEAR = 2023  # not a leap year; its weekdays do not matter


def tomorrow_is_right(prompt: str, answer: str) -> bool:
    """By the calendar of the standard library."""
    today, date = prompt.removeprefix("Today is ").removesuffix(". What is tomorrow?").split(", ")
    weekday, following = answer.split(", ")
    next_day = datetime.strptime(f"{date} {YEAR}", "%d %B %Y") + timedelta(days=1)
    names = list(calendar.day_name)
    return following == f"{next_day.day} {next_day:%B}" and names[(names.index(today) + 1) % 7] == weekday


def same_quantity(prompt: str, answer: str) -> bool:
    amount, unit, _, wanted = prompt.removeprefix("Convert ").removesuffix(".").split()
    converted, smaller = answer.split()
    factors = METRES | OTHER_UNITS
    return smaller == wanted and math.isclose(int(amount) * factors[unit], int(converted) * factors[smaller])


def test_every_answer_is_right() -> None:
    """Checked by another road than the generator's: from the words of prompt and answer."""
    checked = 0
    for record in records("sft-eval.jsonl"):
        prompt, answer = record["src"][0], record["tgt"][0]
        numbers = [int(word.strip(",.?")) for word in prompt.split() if word.strip(",.?").isdigit()]
        if record["task"] == "addition":
            assert int(answer.split()[-1]) == sum(numbers)
            assert all(
                int(step.split()[0]) + int(step.split()[2]) == int(step.split()[4]) for step in answer.split(", ")
            )
        elif record["task"] == "sorting":
            assert [int(word) for word in answer.split(", ")] == sorted(numbers, reverse="descending" in prompt)
        elif record["task"] == "comparison":
            assert int(answer) == (max(numbers) if "largest" in prompt else min(numbers))
        elif record["task"] == "counting":
            steps = [int(word) for word in answer.split(", ")]
            signed = numbers[1] if " up " in prompt else -numbers[1]
            assert steps == [numbers[0] + signed * index for index in range(5)]
        elif record["task"] == "conversion":
            assert same_quantity(prompt, answer)
        elif record["task"] == "dates":
            assert tomorrow_is_right(prompt, answer)
        elif record["task"] == "reversing":
            letters = prompt.removeprefix("Reverse ").removesuffix(".")
            assert answer == "".join(reversed(letters))
        else:
            pytest.fail(f"no check of {record['task']}")
        checked += 1
    assert checked == 280
