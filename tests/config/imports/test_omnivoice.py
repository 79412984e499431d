"""OmniVoice's two files: every key has its row, and the configurations that it ships with become ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from erniekit.config import Config
from erniekit.config.imports.omnivoice import TABLE, convert
from erniekit.errors import ConfigurationError

KEYS = """
output_dir data_config llm_name_or_path audio_vocab_size audio_mask_id num_audio_codebook audio_codebook_weights
drop_cond_ratio prompt_ratio_range mask_ratio_range language_ratio use_pinyin_ratio instruct_ratio only_instruct_ratio
resume_from_checkpoint init_from_checkpoint learning_rate weight_decay max_grad_norm steps seed lr_scheduler_type
warmup_type warmup_ratio warmup_steps batch_tokens gradient_accumulation_steps num_workers mixed_precision allow_tf32
use_deepspeed deepspeed_config attn_implementation max_sample_tokens min_sample_tokens max_batch_size logging_steps
eval_steps save_steps keep_last_n_checkpoints
"""  # of its TrainingConfig, commit 468e927
COMMON: dict[str, Any] = {
    "llm_name_or_path": "Qwen/Qwen3-0.6B", "audio_vocab_size": 1025, "audio_mask_id": 1024, "num_audio_codebook": 8,
    "audio_codebook_weights": [8, 8, 6, 6, 4, 4, 2, 2], "drop_cond_ratio": 0.1, "prompt_ratio_range": [0.0, 0.3],
    "mask_ratio_range": [0.0, 1.0], "instruct_ratio": 0.0, "only_instruct_ratio": 0.0, "use_pinyin_ratio": 0.0,
    "resume_from_checkpoint": None, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 42, "warmup_type": "ratio",
    "warmup_steps": 0, "batch_tokens": 8192, "gradient_accumulation_steps": 1, "mixed_precision": "bf16",
    "allow_tf32": True, "keep_last_n_checkpoints": -1,
}  # fmt: skip
FINETUNE: dict[str, Any] = COMMON | {
    "language_ratio": 0.8, "init_from_checkpoint": "k2-fsa/OmniVoice", "learning_rate": 1e-5, "steps": 5000,
    "warmup_ratio": 0.01, "num_workers": 2, "logging_steps": 50, "eval_steps": 500, "save_steps": 500,
}  # fmt: skip
SHIPPED: dict[str, dict[str, Any]] = {
    "emilia": COMMON
    | {
        "language_ratio": 0.0, "init_from_checkpoint": None, "learning_rate": 1e-4, "steps": 300_000,
        "warmup_ratio": 0.03, "num_workers": 4, "logging_steps": 100, "eval_steps": 1000, "save_steps": 10_000,
    },
    "multilingual": COMMON
    | {
        "language_ratio": 0.8, "use_pinyin_ratio": 0.3, "instruct_ratio": 1.0, "only_instruct_ratio": 0.5,
        "init_from_checkpoint": None, "learning_rate": 1e-4, "steps": 2_000_000, "warmup_ratio": 0.03, "num_workers": 4,
        "logging_steps": 100, "eval_steps": 1000, "save_steps": 10_000,
    },
    "finetune": FINETUNE,
    "finetune-padded": FINETUNE
    | {"attn_implementation": "sdpa", "max_sample_tokens": 2000, "min_sample_tokens": 50, "max_batch_size": 64},
}  # fmt: skip
DATA = {"train": [{"manifest_path": ["train/data.lst"]}], "dev": [{"manifest_path": ["dev/data.lst"]}]}


def written(folder: Path, training: dict[str, Any], data: Any = None) -> tuple[Path, Path]:
    files = folder / "train.json", folder / "data.json"
    for file, values in zip(files, (training, DATA if data is None else data), strict=True):
        file.write_text(json.dumps(values, indent=4), encoding="utf-8")
    return files


def config_of(folder: Path, training: dict[str, Any], data: Any = None) -> Config:
    """What is written, read as `erniekit train` reads it."""
    file = folder / "ours.yaml"
    file.write_text(convert(*written(folder, training, data)).yaml(["Head"]), encoding="utf-8")
    return Config.load(file)


def problems(folder: Path, training: dict[str, Any], data: Any = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        convert(*written(folder, training, data))
    return str(caught.value)


def test_every_key_of_its_configuration_has_a_row() -> None:
    assert set(TABLE) == set(KEYS.split())


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_resolve_without_a_value_that_has_no_effect(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, SHIPPED[name])
    assert [line for line in config.messages if "no effect" in line] == []
    assert config.basic.stage == "TTS" and config.speech.tts_objective == "masked"
    assert config.training.max_steps == SHIPPED[name]["steps"]
    assert config.training.learning_rate == SHIPPED[name]["learning_rate"]
    assert config.speech.audio_codebook_weights == (8, 8, 6, 6, 4, 4, 2, 2)
    assert config.codes.codec_levels == 8 and config.codes.codebook_size == 1024
    assert config.training.lr_scheduler_type == "cosine" and config.precision.bf16
    assert config.training.train_dataset_path == ("train/data.lst",)
    assert config.evaluation.eval_dataset_path == ("dev/data.lst",) and config.evaluation.max_evaluate_steps == -1
    assert config.checkpoint.save_total_limit is None


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "multilingual"])  # as emilia but for shares
def test_examples_are_what_is_written(name: str, tmp_path: Path) -> None:
    example = Path(f"examples/configs/speech/omnivoice-{name}.yaml")
    own = {"train_dataset_path", "eval_dataset_path", "output_dir", "logging_dir", "sharding"}
    own |= {"sharding_parallel_degree"}
    found, expected = Config.load(example).resolved(), config_of(tmp_path, SHIPPED[name]).resolved()
    assert {key: value for key, value in found.items() if key not in own} == {
        key: value for key, value in expected.items() if key not in own
    }


def test_absent_keys_have_the_defaults_of_its_trainer(tmp_path: Path) -> None:
    config = config_of(tmp_path, {})
    assert config.training.weight_decay == 0.01 and config.training.warmup_ratio == 0.03
    assert config.acceleration.dataloader_num_workers == 8 and config.speech.pinyin_probability == 0.3
    assert config.basic.model_name_or_path == "Qwen/Qwen3-0.6B" and config.basic.from_hf_hub


def test_weights_of_a_checkpoint_win_over_the_language_model(tmp_path: Path) -> None:
    assert config_of(tmp_path, FINETUNE).basic.model_name_or_path == "k2-fsa/OmniVoice"
    assert not config_of(tmp_path, FINETUNE).is_set("codec")  # it is in the model's folder
    (tmp_path / "mine").mkdir()
    config = config_of(tmp_path, COMMON | {"init_from_checkpoint": str(tmp_path / "mine")})
    assert config.basic.model_name_or_path == str(tmp_path / "mine") and not config.basic.from_hf_hub


def test_packing_or_batches_of_similar_length(tmp_path: Path) -> None:
    packed, padded = config_of(tmp_path, FINETUNE), config_of(tmp_path, SHIPPED["finetune-padded"])
    assert packed.acceleration.packing and packed.training.max_seq_len == 8192
    found = padded.acceleration
    assert (found.packing, found.batch_tokens, found.max_batch_samples) == (False, 8192, 64)
    assert (found.min_sample_len, found.max_sample_len) == (50, 2000)


def test_schedules_are_those_of_its_trainer(tmp_path: Path) -> None:
    constant = config_of(tmp_path, {"lr_scheduler_type": "constant", "warmup_type": "steps", "warmup_steps": 7})
    assert constant.training.lr_scheduler_type == "constant_with_warmup"
    assert (constant.training.warmup_steps, constant.training.warmup_ratio) == (7, 0.0)
    odd = convert(*written(tmp_path, {"lr_scheduler_type": "linear"}))
    assert odd.parameters["lr_scheduler_type"] == "cosine"
    assert any("takes cosine for every word but constant" in line for line in odd.told)


def test_the_stage_of_zero_comes_from_deepspeeds_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": "auto"}}', encoding="utf-8"
    )
    chosen = {"use_deepspeed": True, "deepspeed_config": "ds.json"}
    result = convert(*written(tmp_path, chosen))
    assert result.parameters["sharding"] == "stage2"
    assert [line for line in result.told if line.startswith("ds.json")] == [
        "ds.json, zero_optimization.overlap_comm: True: its memory and communication are managed without it here"
    ]
    assert "sharding" not in convert(*written(tmp_path, chosen | {"use_deepspeed": False})).parameters
    assert "no.json does not exist" in problems(tmp_path, chosen | {"deepspeed_config": "no.json"})


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"stepz": 5}, "train.json:2: `stepz`: unknown key; did you mean `steps`?"),
        ({"resume_from_checkpoint": "a"}, "train.json:2: `resume_from_checkpoint`: the checkpoints of its trainer"),
        ({"audio_mask_id": 0}, "train.json:2: `audio_mask_id`: expected 1024, audio_vocab_size - 1"),
        ({"mixed_precision": "fp8"}, "`mixed_precision`: expected no, fp16 or bf16"),
        ({"drop_cond_ratio": 2}, "as `condition_dropout` must be at most 1.0, got 2"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, training: dict[str, Any], told: str) -> None:
    assert told in problems(tmp_path, training)


def test_manifests_are_named_as_often_as_they_repeat(tmp_path: Path) -> None:
    data = {
        "train": [
            {"language_id": "en", "manifest_path": ["en.lst"], "repeat": 2},
            {"language_id": "zh", "manifest_path": ["zh.lst", "yue.lst"]},
        ]
    }
    result = convert(*written(tmp_path, {}, data))
    assert result.parameters["train_dataset_path"] == ["en.lst", "en.lst", "zh.lst", "yue.lst"]
    assert result.parameters["do_eval"] is False
    assert any(line.startswith("language_id of the data") for line in result.told)
    text = yaml.safe_load(result.yaml(["Head"]))
    assert text["train_dataset_path"] == ["en.lst", "en.lst", "zh.lst", "yue.lst"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "`train`: names no manifest_path"),
        ({"train": [{"manifest_path": "a.lst"}]}, "`manifest_path`: expected a list of files"),
        ({"train": [{"manifest_path": ["a"], "repeat": 0}]}, "`repeat`: expected how often, from 1 to 1,000, got 0"),
        ({"train": [{"manifest_path": ["a"], "weight": 1}]}, "`train[].weight`: unknown key"),
        ({"train": [{"manifest_path": ["a"]}], "test": []}, "`test`: unknown key"),
    ],
)
def test_data_of_another_form_is_refused(tmp_path: Path, data: Any, told: str) -> None:
    found = problems(tmp_path, {}, data)
    assert told in found and "data.json" in found
