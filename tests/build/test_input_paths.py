"""Which folders and files a command would read, and which of them are missing."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.build.input_paths import missing_paths
from erniekit.config import Config

NEEDED: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t.jsonl"}


def _config(**values: Any) -> Config:
    return Config.from_mapping(NEEDED | values)


@pytest.mark.proves("eval_split")
def test_an_evaluation_of_held_out_records_reads_the_training_files() -> None:
    held_out = {"do_train": False, "do_eval": True, "train_dataset_path": "missing.jsonl"}
    missing = [name for name, _ in missing_paths(_config(**held_out, eval_split=0.1), "train")]
    assert "train_dataset_path" in missing
    others = _config(**held_out, eval_dataset_path="others.jsonl")
    assert "train_dataset_path" not in [name for name, _ in missing_paths(others, "train")]
