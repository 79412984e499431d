"""Which folders and files a command would read, and which of them are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.build.input_paths import check_codec, check_shard_paths, missing_paths
from erniekit.config import Config
from erniekit.errors import ConfigurationError, ModelFileError

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


def _codes(**values: Any) -> Config:
    return Config.from_mapping({"output_dir": "o", "train_dataset_path": "t.jsonl"} | values, verb="codes")


@pytest.mark.proves("codec", "codec_features")
def test_folders_of_codecs_and_speech_models_say_what_they_are(tmp_path: Path) -> None:
    check_codec(_codes())
    check_codec(_codes(codec="kmeans"))
    with pytest.raises(ModelFileError, match=r"`codec`: .* has no config\.json"):
        check_codec(_codes(codec=str(tmp_path)))
    with pytest.raises(ModelFileError, match=r"`codec_features`: .* has no config\.json"):
        check_codec(_codes(codec="kmeans", codec_features=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="model_type"):
        check_codec(_codes(codec=str(tmp_path)))


@pytest.mark.proves("codes_format")
def test_only_shards_need_a_folder_without_spaces(tmp_path: Path) -> None:
    folder = str(tmp_path / "two words")
    check_shard_paths(_codes(output_dir=folder, codec="kmeans", codes_format="jsonl"))
    with pytest.raises(ConfigurationError, match="contains a space"):
        check_shard_paths(_codes(output_dir=folder))


def test_files_of_rewards_must_be_there(tmp_path: Path) -> None:
    values = {"stage": "GRPO", "rewards": [f"python:{tmp_path}/mine.py:score", f"json_schema:{tmp_path}/a.json"]}
    told = dict.fromkeys(what for name, what in missing_paths(_config(**values), "train") if name == "rewards")
    assert [what.split(" does")[0] for what in told] == [f"{tmp_path}/mine.py", f"{tmp_path}/a.json"]
