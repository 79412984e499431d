"""Every word of `sharding_parallel_config` acts, or is told to change nothing; the stages beside other layouts."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.sections.distributed_flags import IGNORED_SHARDING_FLAGS, LEVEL1_FLAGS, SHARDING_FLAGS
from erniekit.errors import ConfigurationError

ACTS = {"split_param", "enable_stage1_tensor_fusion", "enable_release_grads"}  # tests/distributed/test_sharding.py


def config(**values: Any) -> Config:
    needed = {"model_name_or_path": "m", "train_dataset_path": "t.jsonl", "output_dir": "o", "max_steps": 1}
    return Config.from_mapping({**needed, "sharding_parallel_degree": 2, **values}, [], verb="train")


def reported(words: str, **values: Any) -> str:
    return "\n".join(config(sharding_parallel_config=words, **values).messages)


@pytest.mark.proves("sharding_parallel_config")
@pytest.mark.parametrize("word", SHARDING_FLAGS)
def test_a_word_acts_or_is_told(word: str) -> None:
    message = reported(word, sharding="stage1")
    if word in IGNORED_SHARDING_FLAGS:
        assert f"{word} has no effect: {IGNORED_SHARDING_FLAGS[word]}" in message
    else:
        assert word not in message and word in ACTS


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
@pytest.mark.parametrize("word", LEVEL1_FLAGS)
def test_words_of_stage1_are_told_beside_others(word: str, stage: str) -> None:
    assert f"{word} has no effect: {LEVEL1_FLAGS[word][stage]}" in reported(word, sharding=stage)


def test_what_cannot_be_fused_is_told() -> None:
    assert "tensor_fusion has no effect: split_param" in reported(
        "enable_stage1_tensor_fusion split_param", sharding="stage1"
    )
    words = "enable_stage1_tensor_fusion enable_release_grads"
    assert "tensor_fusion has no effect: fused gradients" in reported(words, sharding="stage1")


@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_enable_release_grads_stands_for_release_grads(stage: str) -> None:
    assert config(sharding=stage, sharding_parallel_config="enable_release_grads")["release_grads"]
    assert not config(sharding=stage)["release_grads"]


@pytest.mark.parametrize("stage", ["stage2", "stage3"])
@pytest.mark.parametrize("other", ["tensor_parallel_degree", "pipeline_parallel_degree"])
def test_stages_that_divide_whole_models_are_refused_beside_their_parts(stage: str, other: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{other} is 2; write sharding: stage1"):
        config(sharding=stage, **{other: 2})
    config(sharding="stage1", **{other: 2})
