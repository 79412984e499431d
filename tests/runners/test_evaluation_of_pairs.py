"""Evaluation of preference pairs: the same figures in whatever batches, for every loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.runners.evaluate import run_evaluation
from tests.tiny_runs import save_random_model

ROOT = Path(__file__).parents[2]
LOSSES = ["sigmoid", "ipo", "kto_pair", "simpo", "orpo", "nca_pair"]
BATCHES = [
    {"packing": False, "per_device_eval_batch_size": 1},
    {"packing": False, "per_device_eval_batch_size": 7, "use_sparse_head_and_loss_fn": True},
    {"packing": True, "per_device_eval_batch_size": 3, "use_fused_head_and_loss_fn": True},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files of pairs, the second of them with longer prompts."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = (ROOT / "examples/data/preference-eval.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines[:21]]
    for record in records[13:]:
        record["src"], record["tgt"] = ["What is 1 + 1?", *record["src"]], ["2"]
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for path, part in zip(paths, (records[:13], records[13:]), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in part), encoding="utf-8")
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def other_base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other random weights, so that rewards are not 0."""
    return save_random_model(tiny_model, tmp_path_factory.mktemp("other"), seed=8)


@pytest.fixture
def evaluate(
    make_config: Callable[..., Any], tiny_base: Path, other_base: Path, files: list[str]
) -> Callable[..., Any]:
    def run(**parameters: Any) -> Any:
        values = {
            "stage": "DPO", "do_train": False, "do_eval": True, "model_name_or_path": str(tiny_base),
            "ref_model_name_or_path": str(other_base), "continue_training": True, "eval_dataset_path": files,
            "eval_answers": 0,
        }  # fmt: skip
        if parameters.get("loss_type") in ("simpo", "orpo"):
            del values["ref_model_name_or_path"]
        return run_evaluation(make_config(**{**values, **parameters}))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_figures_of_pairs_do_not_depend_on_the_batches(evaluate: Callable[..., Any], loss_type: str) -> None:
    expected = evaluate(loss_type=loss_type)
    assert expected.units == 21 and len(expected.sources) == 2
    for batches in BATCHES:  # float32 sums over a few hundred tokens, in other tiles
        found = evaluate(loss_type=loss_type, **batches)
        assert found.batches != expected.batches
        assert found.units == expected.units
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.metrics == pytest.approx(expected.metrics, rel=3e-6, abs=3e-6)
        for name, part in expected.sources.items():
            assert found.sources[name].loss == pytest.approx(part.loss, rel=1e-6)
            assert found.sources[name].metrics == pytest.approx(part.metrics, rel=3e-6, abs=3e-6)


def test_the_total_of_pairs_is_the_sum_of_the_files(evaluate: Callable[..., Any]) -> None:
    whole = evaluate()
    assert [part.units for part in whole.sources.values()] == [13, 8]
    for figure, value in whole.metrics.items():
        parts = sum(part.metrics[figure] * part.units for part in whole.sources.values())
        assert value == pytest.approx(parts / 21, rel=1e-9), figure
