"""The flags of `unified_checkpoint_config`: expansion, contradictions, and flags without effect."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.config import Config
from erniekit.config.sections.checkpoint import (
    ALL_OPTIONS,
    UNIFIED_CHECKPOINT_FLAGS,
    CheckpointParameters,
    leaves_no_checkpoint,
    moment_quantization,
    saves_asynchronously,
)
from erniekit.errors import ConfigurationError

NAME = "unified_checkpoint_config"
IN_16_BITS = {"bf16": True, "fp16_opt_level": "O2"}


def loaded(words: str, **values: Any) -> Config:
    return Config.from_mapping({NAME: words, "save_strategy": "steps", **values}, verb="export")


def reported(words: str, **values: Any) -> list[str]:
    return [line for line in loaded(words, **values).messages if "has no effect" in line]


def test_all_options_stand_for_those_that_lose_nothing() -> None:
    config = loaded("enable_all_options", **IN_16_BITS)
    assert config[NAME] == ALL_OPTIONS == ("async_save", "skip_save_model_weight", "master_weight_compatible")
    assert any(
        "changed unified_checkpoint_config [enable_all_options] -> [async_save" in line for line in config.messages
    )
    assert reported("enable_all_options", **IN_16_BITS) == []
    again = Config.from_mapping(config.resolved(), verb="export")
    assert again[NAME] == ALL_OPTIONS
    assert set(loaded("enable_all_options ignore_merge_optimizer")[NAME]) == {*ALL_OPTIONS, "ignore_merge_optimizer"}


@pytest.mark.parametrize("other", ["skip_save_model_weight", "enable_all_options"])
def test_weights_are_saved_once_at_least(other: str) -> None:
    with pytest.raises(ConfigurationError, match="would save no weights at all; leave one of them out"):
        loaded(f"remove_master_weight {other}", **IN_16_BITS)


@pytest.mark.parametrize("word", UNIFIED_CHECKPOINT_FLAGS[:-1])
@pytest.mark.parametrize(
    ("values", "without_effect"),
    [
        (IN_16_BITS, {}),
        ({"fp16": True, "fp16_opt_level": "O2"}, {}),
        ({}, {"remove_master_weight": "weights are float32", "skip_save_model_weight": "weights are float32"}),
        (
            {"bf16": True, "fp16_opt_level": "O1"},
            {"remove_master_weight": "weights are float32", "skip_save_model_weight": "weights are float32"},
        ),
        ({**IN_16_BITS, "lora": True}, {"skip_save_model_weight": "adapters are small"}),
        ({**IN_16_BITS, "ignore_save_lr_and_optim": True}, {"remove_master_weight": "no optimizer state"}),
        (
            {**IN_16_BITS, "unified_checkpoint": False},
            dict.fromkeys(["remove_master_weight", "skip_save_model_weight", "ignore_merge_optimizer"], "every rank"),
        ),
    ],
    ids=["bf16 O2", "fp16 O2", "float32", "bf16 O1", "adapters", "without optimizer", "parts of ranks"],
)
def test_what_changes_nothing_is_told(word: str, values: dict[str, Any], without_effect: dict[str, str]) -> None:
    lines = reported(word, **values)
    assert len(lines) == (word in without_effect)
    assert all(f"{word} has no effect: " in line and without_effect[word] in line for line in lines)


@pytest.mark.proves("save_strategy", "unified_checkpoint_config", "ckpt_quant_stage", "disable_ckpt_quant")
def test_what_sections_tell_of_checkpoints() -> None:
    def made(**values: Any) -> CheckpointParameters:
        return CheckpointParameters(**values)

    assert moment_quantization(made()) == "O0"
    assert moment_quantization(made(ckpt_quant_stage="O2")) == "O2"
    assert moment_quantization(made(ckpt_quant_stage="O2", disable_ckpt_quant=True)) == "O0"
    assert not saves_asynchronously(made())
    assert saves_asynchronously(made(unified_checkpoint_config=("async_save",)))
    assert len(leaves_no_checkpoint(made(save_strategy="no"))) == 1
    assert leaves_no_checkpoint(made(save_strategy="epoch")) == []
