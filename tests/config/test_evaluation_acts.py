"""Proofs of section 1.2: held-out data, when and how much of it is evaluated, and what an evaluation decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.config.registry import PARAMETERS
from erniekit.config.stages import STAGES, Stage
from erniekit.errors import UserError
from tests.config.samples import load, problems

Train = Callable[..., Any]
Evaluations = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def evaluations(train: Train, records: Path) -> Evaluations:
    """The evaluations of a run that evaluates every two of its four steps."""

    def run(**values: Any) -> list[dict[str, Any]]:
        asked = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 2, "max_evaluate_steps": -1}
        return [entry for entry in train(**{**asked, **values}).log if "eval_loss" in entry]

    return run


@pytest.mark.proves("do_eval", "evaluation_strategy", "eval_steps")
def test_evaluations_happen_when_asked(evaluations: Evaluations) -> None:
    assert [entry["step"] for entry in evaluations()] == [2, 4]
    assert [entry["step"] for entry in evaluations(eval_steps=3)] == [3, 4]
    assert evaluations(do_eval=False) == []
    assert evaluations(evaluation_strategy="no") == []
    epochs = {"evaluation_strategy": "epoch", "max_steps": None, "num_train_epochs": 2}
    assert [entry["step"] for entry in evaluations(**epochs)] == [8, 16]


@pytest.mark.proves("max_evaluate_steps", "per_device_eval_batch_size")
def test_an_evaluation_has_as_many_batches_as_asked(evaluations: Evaluations) -> None:
    """15 packs, two at a time as in training; the figures do not depend on how many at a time."""
    two = evaluations()[-1]
    one = evaluations(per_device_eval_batch_size=1)[-1]
    assert (two["eval_batches"], one["eval_batches"]) == (8, 15)
    assert one["eval_loss"] == pytest.approx(two["eval_loss"], rel=1e-5)
    capped = evaluations(max_evaluate_steps=3)[-1]
    assert (capped["eval_batches"], capped["eval_batches_available"]) == (3, 8)
    assert evaluations(max_evaluate_steps=None)[-1]["eval_batches"] == 1


@pytest.mark.proves("eval_dataset_path", "eval_dataset_type", "eval_dataset_prob")
def test_the_files_of_an_evaluation(train: Train, records: Path, tmp_path: Path) -> None:
    alpaca = tmp_path / "alpaca.jsonl"
    alpaca.write_text(
        "".join(json.dumps({"instruction": "Add.", "input": "1", "output": "2"}) + "\n" for _ in range(9))
    )
    asked = {"do_eval": True, "eval_steps": 4, "max_evaluate_steps": -1}
    alone = train(**asked, eval_dataset_path=str(alpaca), eval_dataset_type="alpaca")
    assert "alpaca.jsonl (alpaca): 9 records, 9 kept" in alone.said
    with pytest.raises(UserError, match=r"looks like alpaca: write eval_dataset_type: alpaca"):
        train(**asked, eval_dataset_path=str(alpaca), eval_dataset_type="messages")
    both = {"eval_dataset_path": f"{records},{alpaca}", "eval_dataset_type": "erniekit,alpaca"}
    assert train(**asked, **both).log[-1]["eval_units"] > alone.log[-1]["eval_units"]
    left_out = train(**asked, **both, eval_dataset_prob="0.0,1.0")
    assert left_out.log[-1]["eval_loss"] == alone.log[-1]["eval_loss"]
    assert "evaluation has no data" in problems(do_eval=True)


@pytest.mark.proves("eval_split")
def test_records_are_held_out_of_training(train: Train, records: Path) -> None:
    asked = {"do_eval": True, "eval_steps": 4, "max_evaluate_steps": -1}
    run = train(**asked, eval_split=0.25)
    count = len(records.read_text().splitlines())
    kept = count // 4
    assert f"0.25 of its records, held out): {kept} records, {kept} kept" in run.said
    assert f"without the held-out records): {count - kept} records, {count - kept} kept" in run.said
    assert run.log[-1]["eval_loss"] != train(**asked, eval_dataset_path=str(records)).log[-1]["eval_loss"]
    assert "`eval_dataset_path` (given values) and `eval_split` (given values) exclude each other" in problems(
        **asked, eval_split=0.1, eval_dataset_path="e.jsonl"
    )
    assert "packed data has rows of several records" in problems(
        eval_split=0.1, train_dataset_type="packed", train_dataset_path="folder"
    )
    assert "no `train_dataset_path` to hold records out of" in problems(
        do_train=False, do_eval=True, eval_split=0.1, train_dataset_path=None
    )
    assert "must be less than 1" in problems(eval_split=1)


@pytest.mark.proves("eval_answers")
def test_so_many_dialogues_are_answered_and_scored(train: Train, records: Path) -> None:
    asked = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 4}
    short = {"max_seq_len": 64}  # ends answers of a model that knows nothing
    run = train(**asked, **short, eval_answers=3)
    assert len((run.output / "eval_samples.jsonl").read_text().splitlines()) == 3 == run.log[-1]["eval_answers"]
    assert 0 <= run.log[-1]["eval_rougeL"] <= 1
    none = train(**asked, **short)
    assert not (none.output / "eval_samples.jsonl").exists() and "eval_rougeL" not in none.log[-1]


@pytest.mark.proves(
    "metric_for_best_model", "greater_is_better", "early_stopping_patience", "early_stopping_threshold",
    "load_best_model_at_end",
)  # fmt: skip
def test_the_best_evaluation_decides(train: Train, records: Path) -> None:
    """At this learning rate the loss falls first and rises later; accuracy has its own best step."""
    values = {
        "do_eval": True, "eval_dataset_path": str(records), "eval_steps": 1, "max_evaluate_steps": -1, "max_steps": 6,
        "save_strategy": "steps", "save_steps": 100, "lr_scheduler_type": "constant",
    }  # fmt: skip
    assert train(**values).result.step == 6
    lost = train(**values, early_stopping_patience=1, early_stopping_threshold=100.0)
    assert lost.result.step == 2 and "stopping early: eval_loss" in lost.said
    # where a greater loss is taken for a better one, nothing improves while the model learns
    assert train(**values, early_stopping_patience=2, greater_is_better=True).result.step == 3
    first = train(**values, load_best_model_at_end=True, greater_is_better=True)
    assert "saved the model of step 1, where eval_loss was best" in first.said
    weights = (first.output / "model.safetensors").read_bytes()
    assert weights == (first.output / "checkpoint-1" / "model.safetensors").read_bytes()
    accuracy = train(**values, load_best_model_at_end=True, metric_for_best_model="token_accuracy")
    assert "is read as eval_token_accuracy" in accuracy.said
    figures = [entry["eval_token_accuracy"] for entry in accuracy.log if "eval_loss" in entry]
    state = json.loads((accuracy.output / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best"]["value"] == max(figures)


@pytest.mark.parametrize("metric", ["wer", "eval_cer"])
def test_lower_error_rates_are_better(metric: str) -> None:
    held_out = {"do_eval": True, "eval_dataset_path": "e.jsonl", "metric_for_best_model": metric}
    section = load(**held_out, eval_answers=5).evaluation
    assert section.metric_for_best_model == f"eval_{metric.removeprefix('eval_')}" and not section.greater_is_better
    assert "needs answers" in problems(**held_out)
    assert load(**held_out | {"metric_for_best_model": "bleu"}, eval_answers=5).evaluation.greater_is_better


LESS_IS_BETTER = {
    "eval_loss", "eval_perplexity", "eval_preference_loss", "eval_reward_undesirable", "eval_kl",
    "eval_reward_rejected", "eval_divergence", "eval_sft_loss", "eval_completion_len", "eval_completions_cut",
    "eval_wer", "eval_cer",
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_every_metric_has_a_better_side(stage: Stage) -> None:
    own = {
        "teacher_model_name_or_path": "teacher", "codec": "codec", "rewards": ["numeric"],
        "speech_judge": "pocketsphinx",
    }  # fmt: skip
    values = {name: value for name, value in own.items() if stage.name in PARAMETERS[name].stages}
    for metric in (*stage.metrics, *stage.answer_metrics):
        held_out = {"do_eval": True, "eval_dataset_path": "e.jsonl", "metric_for_best_model": metric}
        answers = {"eval_answers": 5} if metric in stage.answer_metrics else {}
        section = load(stage=stage.name, **held_out, **answers, **values).evaluation
        assert section.greater_is_better == (metric not in LESS_IS_BETTER), metric


def test_a_normaliser_without_answers_is_told() -> None:
    held_out = {"do_eval": True, "eval_dataset_path": "e.jsonl", "text_normalizer": "Basic"}
    assert load(**held_out, eval_answers=2).evaluation.text_normalizer == "basic"
    assert any("text_normalizer" in line for line in load(**held_out).messages)
    assert "text_normalizer" in problems(**held_out | {"text_normalizer": "german"})


def test_one_batch_decides_nothing_where_answers_do() -> None:
    asked = {"do_eval": True, "eval_dataset_path": "e.jsonl", "load_best_model_at_end": True, "save_strategy": "steps"}
    assert any("chosen on 1 batch" in line for line in load(**asked).messages)
    by_answers = load(**asked, eval_answers=5, metric_for_best_model="wer")
    assert not any("chosen on 1 batch" in line for line in by_answers.messages)
