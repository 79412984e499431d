"""Which prompts a run reads, and which it takes, one after another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.model import begin
from erniekit.config import Config
from erniekit.errors import DataError
from erniekit.rollouts.prompts import PromptDataset, PromptPlan, evaluation_prompts, training_prompts

Make = Callable[..., Config]
TURNS = ["What is 1 + 2?", "Three, and what is 2 + 2, and 3 + 3?", "And 4 + 4?"]


def dialogue(rounds: int, number: int = 0) -> dict[str, Any]:
    """A dialogue whose last question is to be answered."""
    messages = []
    for turn in TURNS[:rounds]:
        messages += [{"role": "user", "content": f"{turn} {number}"}, {"role": "assistant", "content": "a"}]
    return {"messages": messages[:-1], "answer": "3"}


@pytest.fixture
def config(make_config: Make, tmp_path: Path) -> Make:
    def make(*records: Any, **parameters: Any) -> Config:
        path = tmp_path / "prompts.jsonl"
        lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        values = {
            "stage": "GRPO",
            "train_dataset_path": str(path),
            "rewards": ["length:1-9"],
            "max_completion_len": 8,
            "num_generations": 2,
        }
        return make_config(**{**values, **parameters})

    return make


def read(config: Config, held_out: bool = False) -> PromptDataset:
    _, tokenizer, template = begin(config, writes_output=False)
    assert template is not None
    return (evaluation_prompts if held_out else training_prompts)(config, tokenizer, template)


def places(dataset: PromptDataset) -> list[int]:
    return [int(prompt.where.rpartition(":")[2]) for prompt in dataset.prompts]


@pytest.mark.proves("on_bad_record")
def test_a_bad_record_stops_the_run_or_is_skipped(config: Make) -> None:
    records = (dialogue(1), '{"messages": 3}', dialogue(1))
    with pytest.raises(DataError, match=r"prompts.jsonl:2"):
        read(config(*records))
    found = read(config(*records, on_bad_record="skip"))
    assert places(found) == [1, 3] and found.report.skipped == 1


@pytest.mark.parametrize(
    "limit", [{"max_prompt_len": 40}, {"max_seq_len": 48}, {"max_seq_len": 80, "max_completion_len": 40}]
)
def test_long_prompts_are_left_out_cut_or_refused(config: Make, limit: dict[str, int]) -> None:
    records = (dialogue(1), dialogue(3))
    whole = read(config(*records, max_seq_len=256))
    assert len(whole.prompts[1].ids) > 40 >= len(whole.prompts[0].ids)
    assert places(read(config(*records, **limit, over_length_policy="drop"))) == [1]
    cut = read(config(*records, **limit, over_length_policy="truncate_turns"))
    assert places(cut) == [1, 2] and cut.report.cut == 1 and len(cut.prompts[1].ids) <= 40
    with pytest.raises(DataError, match=r"prompts.jsonl:2.*a prompt may have 40 tokens"):
        read(config(*records, **limit, over_length_policy="error"))


def test_a_share_is_held_out(config: Make) -> None:
    made = config(*(dialogue(1, number) for number in range(20)), eval_split=0.25, do_eval=True, eval_steps=2)
    training, held_out = places(read(made)), places(read(made, held_out=True))
    assert held_out and sorted(training + held_out) == list(range(1, 21))


def test_a_share_is_read_in_the_format_of_the_rest(config: Make) -> None:
    records = [{**dialogue(1, number), "prompt": "another", "completion": "a"} for number in range(20)]
    made = config(*records, train_dataset_type="prompt_completion", eval_split=0.25, do_eval=True, eval_steps=2)
    assert {prompt.messages[-1]["content"] for prompt in read(made, held_out=True).prompts} == {"another"}


def test_formats_that_are_named_hold(config: Make, tmp_path: Path) -> None:
    record = {**dialogue(1), "prompt": "another", "completion": "a"}
    texts = {}
    for kind in ("messages", "prompt_completion"):
        found = read(config(record, train_dataset_type=kind))
        texts[kind] = found.prompts[0].messages[-1]["content"]
    assert texts == {"messages": "What is 1 + 2? 0", "prompt_completion": "another"}


def plan(config: Config) -> PromptPlan:
    return PromptPlan(config, read(config))


def test_epochs_follow_one_another(config: Make) -> None:
    records = [dialogue(1, number) for number in range(6)]
    one = plan(config(*records))
    taken = [one.take(4) for _ in range(3)]
    assert sorted(taken[0] + taken[1][:2]) == sorted(taken[1][2:] + taken[2]) == list(range(6))
    assert taken[0] + taken[1][:2] != taken[1][2:] + taken[2] and one.epoch_of(3) == 2.0
    other = plan(config(*records, seed=7))
    assert other.take(6) != taken[0] + taken[1][:2]
    assert plan(config(*records, random_shuffle=False)).take(12) == [*range(6), *range(6)]


def test_the_steps_of_a_run(config: Make) -> None:
    records = [dialogue(1, number) for number in range(6)]
    made = config(*records, max_steps=5)
    assert plan(made).total_steps(made, 4, 2) == 5
    made = config(*records, max_steps=-1, num_train_epochs=3)
    assert plan(made).total_steps(made, 4, 2) == 10  # 18 prompts are 5 rollouts, the last of them not whole


def test_sources_are_mixed(config: Make, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(dialogue(1, number)) + "\n" for number in range(50, 54)), encoding="utf-8")
    records = [dialogue(1, number) for number in range(8)]
    first = str(tmp_path / "prompts.jsonl")
    values = {"train_dataset_path": f"{first},{other}", "train_dataset_prob": "0.5,0.5"}
    joined = plan(config(*records, **values, mix_strategy="concat"))
    assert joined.epoch_size == 12
    drawn = plan(config(*records, **values, mix_strategy="random", num_samples_each_epoch=30))
    assert drawn.epoch_size == 30
