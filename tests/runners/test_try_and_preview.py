"""`train --try`, `preview`, `validate --data` and `env`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.runners import try_one
from erniekit.runners.preview import data_summary, preview


def test_one_sample_is_overfitted_and_nothing_written(make_config: Callable[..., Any]) -> None:
    lines: list[str] = []
    config = make_config(learning_rate=3e-2)
    assert try_one.try_one_sample(config, say=lines.append)
    assert lines[-1].startswith("OK")
    assert "train.jsonl:1" in "\n".join(lines)
    assert not Path(config.basic.output_dir).exists()


def test_a_model_that_does_not_learn_is_told(make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_one, "SECONDS", 0.0)
    lines: list[str] = []
    assert not try_one.try_one_sample(make_config(), say=lines.append)
    assert lines[-1].startswith("NOT OK")


def test_preview_shows_what_is_trained(make_config: Callable[..., Any]) -> None:
    text = preview(make_config(random_shuffle=False, packing=False), documents=3)
    assert "<|begin_of_sentence|>User:" in text
    assert "</s>]]" in text  # the end of an answer is a target
    assert "train.jsonl:1" in text
    assert "\x1b[" not in text
    assert "\x1b[" in preview(make_config(), color=True)


def test_preview_shows_as_many_rows_as_asked(make_config: Callable[..., Any]) -> None:
    config = make_config(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for rows in (1, 2, 3):
        assert preview(config, rows=rows).count("\nrow ") == rows


def test_the_summary_counts(make_config: Callable[..., Any], records: Path) -> None:
    text = data_summary(make_config(max_steps=None, num_train_epochs=1, do_eval=True, eval_dataset_path=str(records)))
    assert "60 records, 60 kept" in text and "evaluation:" in text


def test_env_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["erniekit"] and facts["cpu settings"]["OMP_NUM_THREADS"]
    assert "GFLOP/s" in facts["machine"]["fp32 matrix product"]
