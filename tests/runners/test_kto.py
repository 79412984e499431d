"""Training on answers with a verdict, from a configuration to a model: figures, references, evaluation, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import ConfigurationError, DataError

from .test_dpo import log, weights

ROOT = Path(__file__).parents[2]
Train = Callable[..., Any]


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first thirty of the shipped answers with a verdict."""
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.jsonl"
    lines = (ROOT / "examples/data/verdict-train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:30]), encoding="utf-8")
    return path


@pytest.fixture
def judge(train: Train, tiny_base: Path, answers: Path) -> Train:
    """A short run on answers with a verdict."""

    def run(**parameters: Any) -> Any:
        values = {
            "stage": "KTO", "model_name_or_path": str(tiny_base), "continue_training": True,
            "train_dataset_path": str(answers), "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
            "max_steps": 4, "learning_rate": 1e-3,
        }  # fmt: skip
        return train(**{**values, **parameters})

    return run


@pytest.mark.proves("desirable_weight", "undesirable_weight", "beta", "stage")
def test_a_run_shows_its_figures_and_weighs_the_answers(judge: Train, answers: Path) -> None:
    run = judge(do_eval=True, eval_dataset_path=str(answers), eval_steps=2, max_evaluate_steps=-1)
    entries = log(run)
    first = next(entry for entry in entries if "loss" in entry)
    assert first["loss"] == pytest.approx(0.5, abs=1e-5)  # at first the model is its reference
    assert {"reward_desirable", "reward_undesirable", "kl", "logps"} <= first.keys() and "reward_auc" not in first
    held_out = [entry for entry in entries if "eval_loss" in entry]
    assert held_out[-1]["eval_reward_auc"] > 0.5
    assert held_out[-1]["eval_reward_desirable"] > held_out[-1]["eval_reward_undesirable"]
    assert (run.output / "model.safetensors").is_file()
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    share = sum(record["label"] for record in records) / len(records)
    whole = {"max_steps": 1, "per_device_train_batch_size": 15}
    weighed = judge(**whole, desirable_weight=2.0)
    assert weighed.losses[0] == pytest.approx(0.5 * (1 + share), abs=1e-4)
    weighed = judge(**whole, undesirable_weight=0.5)
    assert weighed.losses[0] == pytest.approx(0.5 * (share + 0.5 * (1 - share)), abs=1e-4)
    assert judge(beta=0.3).losses[-1] != judge(beta=0.1).losses[-1]


def test_the_reference_is_the_same_in_every_way_and_batches_do_not_count(judge: Train) -> None:
    copied = judge(reference_model="copy")
    expected = log(copied), weights(copied.output)
    for way in ({}, {"reference_model": "precomputed"}):
        run = judge(**way)
        for own, other in zip(log(run), expected[0], strict=True):
            assert own == pytest.approx(other, rel=1e-5, abs=1e-7)
    rows = judge(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    for own, other in zip(rows.losses, copied.losses, strict=True):
        assert own == pytest.approx(other, rel=2e-6)
    for name, value in weights(rows.output).items():
        np.testing.assert_allclose(value, expected[1][name], atol=2e-5, err_msg=name)


def test_adapters_are_compared_with_their_base(judge: Train) -> None:
    run = judge(lora=True)
    assert "reference: the same model with its adapters disabled" in run.said
    assert run.losses[0] == pytest.approx(0.5, abs=1e-5) and abs(run.losses[-1] - 0.5) > 1e-4


def test_a_resumed_run_goes_on_bit_for_bit(judge: Train) -> None:
    whole = judge(save_strategy="steps", save_steps=2)
    expected = weights(whole.output)
    resumed = judge(resume_from_checkpoint=str(whole.output / "checkpoint-2"), overwrite_output_dir=True)
    for name, value in weights(resumed.output).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_what_is_refused(judge: Train, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="the weights of all answers are 0"):
        judge(desirable_weight=0.0, undesirable_weight=0.0)
    with pytest.raises(DataError, match="write stage: DPO"):
        judge(train_dataset_path=str(pairs))
    with pytest.raises(ConfigurationError, match=r"reads answers with a verdict, not .token_ids"):
        judge(train_dataset_type="token_ids")
    alike = tmp_path / "alike.jsonl"
    alike.write_text('{"src": "q", "tgt": "a", "label": true}\n{"src": "q", "tgt": "b", "label": false}\n')
    with pytest.raises(DataError, match="at least two different prompts"):
        judge(train_dataset_path=str(alike))


def test_a_preview_tells_verdicts(make_config: Callable[..., Any], tiny_base: Path, answers: Path) -> None:
    from erniekit.runners.preview import preview

    config = make_config(stage="KTO", model_name_or_path=str(tiny_base), train_dataset_path=str(answers))
    shown = preview(config, rows=1)
    assert "--- answer 0:" in shown and "to another prompt: " in shown and "desirable: " in shown
