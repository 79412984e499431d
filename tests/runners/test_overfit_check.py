"""With which values `train --try` reads its sample and trains on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build.model import open_tokenizer
from erniekit.config import Config
from erniekit.errors import DataError
from erniekit.runners import overfit_check


@pytest.mark.parametrize(
    ("values", "weights", "name", "seen"),
    [
        ({}, None, "learning_rate", 1e-2),
        ({"learning_rate": 1e-9}, None, "learning_rate", 1e-3),
        ({"learning_rate": 1e-9}, Path("w"), "learning_rate", 1e-4),
        ({"max_grad_norm": 0.25}, None, "max_grad_norm", 0.25),
        ({"lora": True, "continue_training": True, "lora_plus_scale": 4.0}, None, "lora_plus_scale", 4.0),
    ],
    ids=str,
)
def test_it_trains_with_the_values_of_the_run(
    values: dict[str, Any], weights: Path | None, name: str, seen: Any, make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    told: dict[str, Any] = {}
    sample = SimpleNamespace(pair=None)
    result = SimpleNamespace(totals=SimpleNamespace(loss=0.0, metrics={}))
    objectives = SimpleNamespace(single_batch=lambda *parts: None)
    model_config = SimpleNamespace(num_hidden_layers=2, architecture=None)
    replacements: dict[str, Callable[..., Any]] = {
        "begin": lambda config, writes_output: (model_config, SimpleNamespace(pad_id=0), None),
        "first_sample": lambda *parts: ("here", sample),
        "initial_weights": lambda config: weights,
        "adapter_plan": lambda *parts: None,
        "open_model": lambda *parts, **named: SimpleNamespace(train=lambda: None),
        "named_trainable_parameters": lambda model: {},
        "build_optimizer": lambda *parts, **named: told.update(named),
        "collate": lambda *parts, **named: SimpleNamespace(token_count=1, target_count=1),
        "stage_objectives": lambda config: objectives,
        "train_step": lambda *parts, **named: told.update(named) or result,
    }
    for function, replacement in replacements.items():
        monkeypatch.setattr(overfit_check, function, replacement)
    monkeypatch.setattr(overfit_check, "GOAL", float("nan"))
    assert not overfit_check.overfit_check(make_config(**values), seconds=-1.0)
    assert told[name] == seen


def test_samples_that_do_not_fit_are_told_with_the_limits(make_config: Callable[..., Config], tmp_path: Path) -> None:
    def refused(**values: Any) -> str:
        config = make_config(**values)
        with pytest.raises(DataError) as error:
            overfit_check.first_sample(config, *open_tokenizer(config))
        return str(error.value)

    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"src": "count " * 200, "tgt": "no"}))
    assert "none of 1 records fits max_seq_len 100; raise it" in refused(train_dataset_path=str(path), max_seq_len=100)
    path.write_text(json.dumps({"src": ["count " * 200], "tgt": [], "response": [["a"], ["b"]], "sort": [1, 0]}))
    asked = {"stage": "DPO", "train_dataset_path": str(path), "max_seq_len": 40, "max_prompt_len": 7}
    assert "fits max_seq_len 40 or max_prompt_len 7; raise" in refused(**asked)


def test_packed_data_is_opened(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SimpleNamespace(location=lambda index: "packed", sample=lambda index: None)
    monkeypatch.setattr(overfit_check, "training_dataset", lambda *parts: dataset)
    config = make_config(train_dataset_type="packed")
    assert overfit_check.first_sample(config, *open_tokenizer(config)) == ("packed", None)
