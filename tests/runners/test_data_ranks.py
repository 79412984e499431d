"""Ranks that work on different data, or read it for others: the run of one process, with decisions taken together."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from tests.distributed.cases import data_ranks
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
BATCHES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
HALVES = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}


@pytest.fixture
def on_ranks(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., list[Any]]:
    """Train on two ranks into a folder of its own; what each returned."""

    def run(case: Callable[..., Any] = data_ranks.train, **parameters: Any) -> list[Any]:
        own = {name: parameters.pop(name) for name in ("of_rank_1", "step") if name in parameters}
        config = make_config(**{**HALVES, "output_dir": str(tmp_path / "ranks"), **parameters})
        if case is data_ranks.train:
            own.setdefault("of_rank_1", {})
        return run_ranks(case, 2, parameters=config.resolved(), **own)

    return run


def log(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        sources = own.pop("eval_sources", {}), other.pop("eval_sources", {})
        assert own == pytest.approx(other, rel=1e-4, abs=1e-5)
        assert sources[0].keys() == sources[1].keys()
        for name, figures in sources[1].items():
            figures, of_ranks = (
                {k: v for k, v in part.items() if "second" not in k} for part in (figures, sources[0][name])
            )
            assert of_ranks == pytest.approx(figures, rel=1e-4, abs=1e-5)


def test_everything_that_is_logged_is_that_of_one_process(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], records: Path, tmp_path: Path
) -> None:
    """Training, evaluation of two files whose batches do not divide evenly, the best model, and the early end."""
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(records.read_text(encoding="utf-8").splitlines(keepends=True)[:7]), encoding="utf-8")
    parameters = {
        "max_steps": 6, "do_eval": True, "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "eval_dataset_path": [str(records), str(fewer)], "eval_dataset_type": ["erniekit"] * 2,
        "eval_dataset_prob": [1.0, 1.0], "max_evaluate_steps": -1, "per_device_eval_batch_size": 1, "packing": True,
        "load_best_model_at_end": True, "early_stopping_patience": 1, "learning_rate": 0.3,
    }  # fmt: skip
    alone = train(**BATCHES, **parameters)
    ranks = on_ranks(**parameters)
    assert [rank["step"] for rank in ranks] == [alone.result.step] * 2
    assert alone.result.step < 6, "the run was to stop early"
    assert [rank["best"] for rank in ranks] == [alone.result.best.step] * 2
    assert_same(log(tmp_path / "ranks"), log(alone.output))
    results = [json.loads((folder / "eval_results.json").read_text()) for folder in (tmp_path / "ranks", alone.output)]
    assert len(results[1]["eval_sources"]) == 2
    assert_same(*([{name: value for name, value in result.items() if "second" not in name}] for result in results))


def test_dropout_is_that_of_one_process(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    parameters = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "max_steps": 3}
    alone = train(**BATCHES, **parameters)
    on_ranks(**parameters)
    assert_same(log(tmp_path / "ranks"), log(alone.output))


def test_a_loss_over_the_whole_step_is_over_the_pairs_of_all_ranks(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pairs = {"train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"), "stage": "DPO", "max_steps": 3}
    pairs |= {"loss_type": "kto_pair", "max_prompt_len": 64, "packing": True}
    alone = train(**BATCHES, **pairs)
    on_ranks(**pairs)
    assert_same(log(tmp_path / "ranks"), log(alone.output))


@pytest.mark.proves("distributed_dataloader")
def test_one_rank_of_a_tensor_group_reads_the_data(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], records: Path, tmp_path: Path
) -> None:
    """The other one is told to read files that do not exist."""
    parameters = {"max_steps": 4, "do_eval": True, "eval_steps": 2, "dataloader_num_workers": 2}
    parameters |= {"eval_dataset_path": str(records), "max_evaluate_steps": 3}
    alone = train(**BATCHES, **parameters)
    missing = {"train_dataset_path": "missing.jsonl", "eval_dataset_path": "missing.jsonl"}
    missing |= {"data_cache_dir": str(tmp_path / "no cache")}
    divided = {"tensor_parallel_degree": 2, "distributed_dataloader": 1, "sequence_parallel": False}
    ranks = on_ranks(**parameters, **BATCHES, **divided, of_rank_1=missing)
    assert_same(log(tmp_path / "ranks"), log(alone.output))
    assert not (tmp_path / "no cache").exists()
    assert any("60 records" in line for line in ranks[1]["said"])  # what the other has read


def test_one_rank_reads_pairs_and_measures_their_reference_with_the_other(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pairs = {"stage": "DPO", "max_steps": 3, "max_prompt_len": 64, "packing": True, "do_eval": True, "eval_steps": 2}
    pairs |= {
        f"{part}_dataset_path": str(ROOT / f"examples/data/preference-{part}.jsonl") for part in ("train", "eval")
    }
    alone = train(**BATCHES, **pairs)
    missing = {"train_dataset_path": "missing.jsonl", "eval_dataset_path": "missing.jsonl"}
    divided = {"tensor_parallel_degree": 2, "distributed_dataloader": 1}
    on_ranks(**pairs, **BATCHES, **divided, of_rank_1=missing)
    found, expected = log(tmp_path / "ranks"), log(alone.output)
    for lines in (found, expected):
        lines[0].pop("reward_accuracy")  # in the first step both rewards are 0 but for rounding
    assert_same(found, expected)


@pytest.mark.parametrize("divided", [{}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}])
def test_an_evaluation_on_its_own_has_the_figures_of_one_process(
    divided: dict[str, Any], on_ranks: Callable[..., list[Any]], make_config: Callable[..., Config], records: Path,
    tiny_base: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Loss and answers, on ranks that read different batches and on ranks that divide the model; all have them all."""
    parameters = {"do_train": False, "do_eval": True, "eval_dataset_path": str(records), "eval_answers": 6}
    parameters |= {"model_name_or_path": str(tiny_base), "continue_training": True, "max_evaluate_steps": 7}
    config = make_config(**BATCHES, **parameters, output_dir=str(tmp_path / "alone"))
    (alone,) = run_ranks(data_ranks.evaluate, 1, parameters=config.resolved())
    ranks = on_ranks(data_ranks.evaluate, **parameters, **divided)
    for rank in ranks:
        assert rank == pytest.approx(alone, rel=1e-5)
    assert alone["eval_answers"] == 6.0
    samples = [(tmp_path / name / "eval_samples.jsonl").read_text() for name in ("alone", "ranks")]
    assert samples[0] == samples[1] and samples[0].count("\n") == 6


def test_a_signal_to_one_rank_stops_both_after_the_same_step(
    on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    ranks = on_ranks(data_ranks.train_and_get_a_signal, step=2, max_steps=6, save_strategy="steps", save_steps=5)
    assert [(rank["step"], rank["stopped by"]) for rank in ranks] == [(3, signal.SIGTERM)] * 2
    assert (tmp_path / "ranks/checkpoint-3/manifest.json").is_file()


def test_what_is_not_finite_on_one_rank_is_told_by_all(on_ranks: Callable[..., list[Any]]) -> None:
    ranks = on_ranks(data_ranks.train_and_overflow, step=1, max_steps=3)
    assert ranks[0] == ranks[1]
    first, *lines = ranks[0]["error"].splitlines()
    assert first.startswith("step 2: the loss is not finite")
    assert [re.sub(r"train.jsonl:\d+", "LINE", line.partition(": ")[0]) for line in lines[:2]] == [
        "  rank 1, micro-batch 0",
        "  rank 1, micro-batch 1",
    ]
    assert "train.jsonl:" in lines[0]


def test_resuming_counts_the_micro_batches_of_all_ranks(
    train: Callable[..., Any], on_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """What two ranks began, one process goes on with: twice the accumulation reads the same samples."""
    parameters = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    alone = train(**BATCHES, **parameters)
    expected = alone.losses
    on_ranks(**{**parameters, "max_steps": 2})
    again = train(**BATCHES, **parameters, output_dir=str(tmp_path / "ranks"), resume_from_checkpoint=True)
    np.testing.assert_allclose(again.losses, expected, rtol=1e-4)
