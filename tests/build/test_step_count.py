"""`validate` tells the steps of data that somebody has read before, and forgets them when anything changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.step_count import cache_step_count, cached_step_count
from erniekit.data import PLAN_VERSION


def test_steps_are_forgotten_after_a_change(make_config: Callable[..., Any], records: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(records.read_text())
    config = make_config(train_dataset_path=str(copy))
    assert cached_step_count(config) is None
    cache_step_count(config, 17)
    assert cached_step_count(make_config(train_dataset_path=str(copy), learning_rate=1.0)) == 17
    assert cached_step_count(make_config(train_dataset_path=str(copy), max_seq_len=64)) is None
    os.utime(copy, ns=(0, 0))
    assert cached_step_count(config) is None


def test_steps_of_another_plan_or_another_template_are_forgotten(
    make_config: Callable[..., Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_copy = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = make_config(model_name_or_path=str(model_copy))
    cache_step_count(config, 17)
    for name in ("special_tokens_map.json", "chat_template.json"):
        (model_copy / name).write_text("{}")
        assert cached_step_count(config) is None
        (model_copy / name).unlink()
    assert cached_step_count(config) == 17
    monkeypatch.setattr("erniekit.build.step_count.PLAN_VERSION", PLAN_VERSION + 1)
    assert cached_step_count(config) is None


@pytest.mark.proves("eval_split")
def test_steps_without_the_held_out_records_are_others(make_config: Callable[..., Any]) -> None:
    cache_step_count(make_config(), 17)
    assert cached_step_count(make_config(eval_split=0.1)) is None
    cache_step_count(make_config(eval_split=0.1), 15)
    assert (cached_step_count(make_config()), cached_step_count(make_config(eval_split=0.1))) == (17, 15)
    assert cached_step_count(make_config(eval_split=0.2)) is None


def test_a_run_leaves_its_steps(train: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    run = train(max_steps=None, num_train_epochs=2)
    assert cached_step_count(make_config(max_steps=None, num_train_epochs=2)) == run.result.step


def test_an_unwritable_cache_is_no_reason_to_stop(make_config: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(data_cache_dir=str(tmp_path / "file"))
    cache_step_count(config, 3)
    assert cached_step_count(config) is None


def test_steps_of_codes_are_counted_anew(make_config: Callable[..., Any]) -> None:
    """A folder of codes has no file whose time tells that it has changed."""
    config = make_config(stage="TTS")
    cache_step_count(config, 17)
    assert cached_step_count(config) is None
