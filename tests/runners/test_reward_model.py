"""Training a reward model from a configuration, what it leaves, and `erniekit score` on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.cli import main
from erniekit.data.formats.problems import MalformedError, NothingToTrainError
from erniekit.data.formats.registry import FORMATS, parse_record
from erniekit.errors import DataError, ModelFileError, UserError
from erniekit.inference.engine import ChatModel
from erniekit.inference.reward_model import open_reward_model
from erniekit.json_files import read_json_object

from .test_dpo import log, weights

Train = Callable[..., Any]


@pytest.fixture
def rank(train: Train, tiny_base: Path, pairs: Path) -> Train:
    """A short run on pairs."""

    def run(**parameters: Any) -> Any:
        values = {
            "stage": "RM", "model_name_or_path": str(tiny_base), "continue_training": True,
            "train_dataset_path": str(pairs), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "max_steps": 6, "learning_rate": 1e-3,
        }  # fmt: skip
        return train(**{**values, **parameters})

    return run


@pytest.mark.proves("stage", "max_prompt_len")
def test_a_run_leaves_a_model_that_scores_as_its_evaluation_says(rank: Train, pairs: Path, tmp_path: Path) -> None:
    run = rank(do_eval=True, eval_dataset_path=str(pairs), eval_steps=3, max_evaluate_steps=-1)
    assert "score: random, seed" in run.said
    entries = log(run)
    assert {"reward_accuracy", "reward_margin", "reward_chosen"} <= entries[0].keys()
    held_out = [entry for entry in entries if "eval_loss" in entry]
    assert held_out[-1]["eval_reward_margin"] > held_out[0]["eval_reward_margin"]
    values = read_json_object(run.output / "config.json")
    assert values["architectures"][0].endswith("ForSequenceClassification") and values["id2label"] == {"0": "LABEL_0"}
    names = weights(run.output).keys()
    assert "score.weight" in names and "lm_head.weight" not in names

    output = tmp_path / "scores.jsonl"
    assert main(["score", str(run.output), str(pairs), "--output", str(output), "--device", "cpu"]) == 0
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["line"] for each in scored] == list(range(1, 41))
    accuracy = np.mean([each["chosen"] > each["rejected"] for each in scored])
    assert accuracy == pytest.approx(held_out[-1]["eval_reward_accuracy"])
    assert np.mean([each["chosen"] for each in scored]) == pytest.approx(held_out[-1]["eval_reward_chosen"], abs=1e-5)

    scorer = open_reward_model(run.output)
    record = json.loads(pairs.read_text().splitlines()[10])
    messages = [{"role": "user", "content": record["src"][0]}]
    answers = [[*messages, {"role": "assistant", "content": answer[0]}] for answer in record["response"]]
    np.testing.assert_allclose(
        scorer.score_messages(answers), [scored[10]["chosen"], scored[10]["rejected"]], rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ModelFileError, match="is a reward model"):
        ChatModel.load(run.output)


def test_it_goes_on_from_a_reward_model_and_from_a_checkpoint(rank: Train, pairs: Path) -> None:
    whole = rank(save_strategy="steps", save_steps=3)
    expected = weights(whole.output)
    resumed = rank(resume_from_checkpoint=str(whole.output / "checkpoint-3"), overwrite_output_dir=True)
    for name, value in weights(resumed.output).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    further = rank(model_name_or_path=str(whole.output), output_dir=str(whole.output) + "-2", max_steps=1)
    assert "score: random" not in further.said
    with pytest.raises(ModelFileError, match="is a reward model, which gives"):
        rank(stage="DPO", model_name_or_path=str(whole.output), output_dir=str(whole.output) + "-3")


def test_adapters_bring_their_score(rank: Train, pairs: Path, tmp_path: Path) -> None:
    run = rank(lora=True, do_eval=True, eval_dataset_path=str(pairs), eval_steps=6, max_evaluate_steps=-1)
    values = read_json_object(run.output / "adapter_config.json")
    assert values["modules_to_save"] == ["score"] and values["task_type"] == "SEQ_CLS"
    stored = weights(run.output)["base_model.model.score.weight"]
    output = tmp_path / "scores.jsonl"
    assert main(["score", str(run.output), str(pairs), "--output", str(output), "--device", "cpu"]) == 0
    scored = [json.loads(line) for line in output.read_text().splitlines()]
    (held_out,) = [entry for entry in log(run) if "eval_loss" in entry]
    assert np.mean([each["chosen"] for each in scored]) == pytest.approx(held_out["eval_reward_chosen"], abs=1e-5)
    with pytest.raises(ModelFileError, match="is a reward model"):
        ChatModel.load(run.output)
    merged = tmp_path / "merged"
    assert main(["export", str(run.output), "--output", str(merged)]) == 0
    np.testing.assert_allclose(weights(merged)["score.weight"], stored, rtol=1e-2)  # bfloat16, as its base
    again = open_reward_model(merged).score_messages([[{"role": "user", "content": "q"},
                                                       {"role": "assistant", "content": "a"}]])  # fmt: skip
    own = open_reward_model(run.output).score_messages([[{"role": "user", "content": "q"},
                                                         {"role": "assistant", "content": "a"}]])  # fmt: skip
    np.testing.assert_allclose(again, own, rtol=0.05, atol=1e-3)


def test_a_ranking_is_all_of_its_pairs(rank: Train, tmp_path: Path) -> None:
    record = {"src": ["q"], "tgt": [], "response": [["b"], ["a"], ["c"]], "sort": [2, 3, 1]}
    parsed = parse_record(FORMATS["erniekit preferences"], record)
    every = [(pair.chosen[0].content, pair.rejected[0].content, pair.score_difference)
             for pair in (parsed, *parsed.others)]  # fmt: skip
    assert sorted(every) == [("a", "b", 1.0), ("a", "c", 2.0), ("b", "c", 1.0)]
    tie = parse_record(FORMATS["erniekit preferences"], {**record, "sort": [1, 1, 0]})
    assert len((tie, *tie.others)) == 2
    with pytest.raises(NothingToTrainError):
        parse_record(FORMATS["erniekit preferences"], {**record, "sort": [1, 1, 1]})
    with pytest.raises(MalformedError):
        parse_record(FORMATS["erniekit preferences"], {**record, "sort": [1, 0]})
    path = tmp_path / "rankings.jsonl"
    path.write_text(json.dumps(record) + "\n")
    run = rank(train_dataset_path=str(path), max_steps=1)
    assert "3 pairs" in run.said
    with pytest.raises(DataError, match="write stage: RM to train rankings"):
        rank(stage="DPO", train_dataset_path=str(path))


def test_margins_of_trl_are_read() -> None:
    record = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1.5}
    assert parse_record(FORMATS["messages preferences"], record).score_difference == 1.5
    with pytest.raises(MalformedError):
        parse_record(FORMATS["messages preferences"], {**record, "score_chosen": 1, "score_rejected": 0})


def test_what_is_refused(rank: Train, tiny_base: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="gives no score"):
        open_reward_model(tiny_base)
    with pytest.raises(ModelFileError, match="there is no such folder"):
        open_reward_model(tmp_path / "none")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "plain"}\n')
    with pytest.raises(UserError, match="no dialogues, pairs of answers or answers with a verdict"):
        from erniekit.runners.score import score_file

        score_file(tiny_base, bad, None)
