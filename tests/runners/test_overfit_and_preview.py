"""`train --try`, `preview`, `validate --data` and `env`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.errors import UserError
from erniekit.runners import overfit_check
from erniekit.runners.preview import data_summary, preview


def test_one_sample_is_overfitted_and_nothing_written(make_config: Callable[..., Any], logged: list[str]) -> None:
    config = make_config(learning_rate=3e-2)
    assert overfit_check.overfit_check(config)
    assert logged[-1].startswith("OK")
    assert "train.jsonl:1" in "\n".join(logged)
    assert not Path(config.basic.output_dir).exists()
    assert not Path(config.training.data_cache_dir).exists()


def test_only_the_first_sample_that_fits_is_read(
    make_config: Callable[..., Any], tmp_path: Path, logged: list[str]
) -> None:
    path = tmp_path / "data.jsonl"
    long = json.dumps({"src": "count " * 200, "tgt": "no"})
    good = json.dumps({"src": "What is 1 + 1?", "tgt": "2"})
    path.write_text(f"{long}\n{long}\n{good}\nthis line is never read\n", encoding="utf-8")
    logged.clear()
    assert overfit_check.overfit_check(make_config(train_dataset_path=str(path), learning_rate=3e-2))
    assert "skipped 2 records before it" in "\n".join(logged)
    assert f"overfitting {path}:3 " in "\n".join(logged)

    path.write_text(f"{long}\n", encoding="utf-8")
    with pytest.raises(UserError, match="none of 1 records fits max_seq_len 128"):
        overfit_check.overfit_check(make_config(train_dataset_path=str(path)))
    without_data = {"do_train": False, "do_eval": True, "eval_dataset_path": str(path), "train_dataset_path": None}
    with pytest.raises(UserError, match="no file is set"):
        overfit_check.overfit_check(make_config(**without_data))
    path.write_text('{"src": 1}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"data\.jsonl:1: src"):
        overfit_check.overfit_check(make_config(train_dataset_path=str(path)))


def test_a_plain_text_is_tried_too(make_config: Callable[..., Any], tmp_path: Path, logged: list[str]) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "The answer is 4. " * 200}), encoding="utf-8")
    logged.clear()
    config = make_config(stage="PT", train_dataset_path=str(path), train_dataset_type="text", learning_rate=1e-2)
    assert overfit_check.overfit_check(config)
    assert "128 tokens, 128 targets" in "\n".join(logged)


DIVERGING = {"learning_rate": 100, "weight_decay": 1e12}  # weights grow a hundred trillion times in a step


def test_a_loss_that_is_not_finite_is_told(make_config: Callable[..., Any], tmp_path: Path, logged: list[str]) -> None:
    assert not overfit_check.overfit_check(make_config(**DIVERGING))
    assert "NOT OK" in logged[-1] and "is not finite at step" in logged[-1] and "lower learning_rate" in logged[-1]

    make_config()
    words = [f"{name}={value}" for name, value in DIVERGING.items()]
    assert main(["train", str(tmp_path / "config.yaml"), "--try", *words]) == 1  # words in any order


@pytest.mark.parametrize(("limit", "steps"), [({"seconds": 0.0}, 1), ({"steps": 3}, 3)], ids=str)
def test_a_model_that_does_not_learn_is_told(
    make_config: Callable[..., Any], logged: list[str], limit: dict[str, Any], steps: int
) -> None:
    logged.clear()
    assert not overfit_check.overfit_check(make_config(), **limit)
    assert logged[-1].startswith("NOT OK") and f"in {steps} steps" in logged[-1]


def test_preview_shows_what_is_trained(make_config: Callable[..., Any]) -> None:
    text = preview(make_config(random_shuffle=False, packing=False), documents=3)
    assert "<|begin_of_sentence|>User:" in text
    assert "</s>]]" in text  # the end of an answer is a target
    assert "train.jsonl:1" in text
    assert "\x1b[" not in text
    assert "\x1b[" in preview(make_config(), color=True)


def test_preview_escapes_what_would_steer_the_terminal(make_config: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"src": "Hi\x1b[2J\x07 there", "tgt": "\x1b]0;owned\x07 yes\u009b1m"}), encoding="utf-8")
    plain, colored = (preview(make_config(train_dataset_path=str(path)), color=color) for color in (False, True))
    assert "\x1b" not in plain and r"Hi\x1b[2J\x07 there" in plain
    assert "\x07" not in colored and "\x9b" not in colored and "\x1b]" not in colored


def test_preview_tells_what_is_left_out(make_config: Callable[..., Any], records: Path, tmp_path: Path) -> None:
    assert "records, " not in preview(make_config())
    path = tmp_path / "data.jsonl"
    path.write_text(records.read_text() + '{"src": "q", "tgt": ""}\n{"src": "q", "tgt": "a", "difficulty": 1}\n')
    text = preview(make_config(train_dataset_path=str(path)))
    assert "62 records, 61 kept, 1 skipped" in text and "data.jsonl:61: tgt[0]: expected a text" in text
    assert "field not used: difficulty (1 record)" in text


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
