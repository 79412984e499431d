"""The shipped data is what its generator makes, its answers are right, and nothing held out is trained on."""

from __future__ import annotations

import json
import subprocess
import sys
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
    for name in ("sft-train.jsonl", "preference-train.jsonl"):
        assert held_out.isdisjoint(prompt for record in records(name) for prompt in record["src"])
    texts = "\n".join(record["text"] for record in records("text-train.jsonl"))
    assert not any(prompt in texts for prompt in held_out)


def test_rejected_answers_differ_from_chosen_ones() -> None:
    for name in ("preference-train.jsonl", "preference-eval.jsonl"):
        for record in records(name):
            chosen, rejected = record["response"]
            assert record["sort"] == [1, 0] and chosen != rejected


def test_sums_orders_and_extremes_are_right() -> None:
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
        else:
            continue
        checked += 1
    assert checked == 160
