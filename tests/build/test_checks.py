"""Each check reads what the configuration says, and its message repeats it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.build import checks
from erniekit.config import Config
from erniekit.errors import UserError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.training.checkpoint.resume import IDENTITY_FILE, RunIdentity
from tests.model.published_families import CONFIGS

NEEDED: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t.jsonl"}


def _config(**values: Any) -> Config:
    return Config.from_mapping(NEEDED | values)


def _published(size: str) -> ModelConfig:
    model = published_model(f"baidu/ERNIE-4.5-{size}-PT")
    assert model is not None
    return model


DENSE, EXPERTS = _published("0.3B"), _published("21B-A3B")
FREE_OF_BIAS = ModelConfig.from_json({
    "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
})  # fmt: skip
GELU = ModelConfig.from_json(CONFIGS["google/gemma-3-1b-it"])
LORA = {"lora": True, "continue_training": True}
NO_BIAS = "the routers of qwen3_moe have no correction bias"


def test_positions_of_the_model_are_enough() -> None:
    checks.check_positions(_config(max_seq_len=64), replace(DENSE, max_position_embeddings=64))
    with pytest.raises(UserError, match=r"max_seq_len 65 .* exceeds the model's max_position_embeddings 64"):
        checks.check_positions(_config(max_seq_len=65), replace(DENSE, max_position_embeddings=64))


def test_layers_of_prediction_are_those_of_the_weights_or_new() -> None:
    model, asked = replace(EXPERTS, num_nextn_predict_layers=1), {"num_nextn_predict_layers": 2}
    assert checks.with_mtp_layers(model, _config(num_nextn_predict_layers=1)).num_nextn_predict_layers == 1
    assert checks.with_mtp_layers(model, _config(**asked, continue_training=False)).num_nextn_predict_layers == 2
    with pytest.raises(UserError, match=r"num_nextn_predict_layers 2 .* the model has 1 multi-token"):
        checks.with_mtp_layers(model, _config(**asked))


def test_what_a_run_does_not_do_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_importable", lambda name: False)
    named: list[Any] = []
    monkeypatch.setattr(checks, "refuse_missing_trackers", named.append)
    held_out = {"do_eval": True, "eval_dataset_path": "e"}
    evaluated = held_out | {"do_train": False, "report_to": "tensorboard"}
    for values in (evaluated, {"report_to": "tensorboard"}):
        checks.check_trackers(_config(**values))
    assert named == [("tensorboard",)]

    for values in ({"do_eval": False}, held_out | {"eval_answers": 0}, held_out | {"stage": "PT"}):
        checks.check_scoring_libraries(_config(**values))
    with pytest.raises(UserError, match="needs the libraries"):
        checks.check_scoring_libraries(_config(**held_out, eval_answers=3))


@pytest.mark.proves("eval_split")
def test_held_out_records_are_scored_as_those_of_the_training_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_importable", lambda name: name != "jiwer")
    transcripts = {"do_eval": True, "eval_answers": 3, "train_dataset_type": "asr"}
    checks.check_scoring_libraries(_config(**transcripts, eval_dataset_path="e"))  # of which the type is another
    with pytest.raises(UserError, match="jiwer"):
        checks.check_scoring_libraries(_config(**transcripts, eval_split=0.1))


def test_transcripts_need_the_library_of_error_rates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def is_importable(name: str) -> bool:
        asked.append(name)
        return name != "jiwer"

    monkeypatch.setattr(checks, "is_importable", is_importable)

    def config(*kinds: str, train: tuple[str, ...] = (), split: float = 0.0) -> Any:
        sections = {"eval_answers": 3, "eval_dataset_type": kinds, "eval_split": split}
        return SimpleNamespace(
            basic=SimpleNamespace(do_eval=True),
            training=SimpleNamespace(train_dataset_type=train),
            evaluation=SimpleNamespace(**sections),
            stage=SimpleNamespace(reads_codes=False, answer_metrics=("eval_bleu",)),
        )

    checks.check_scoring_libraries(config("erniekit"))
    assert asked == ["rouge_score", "sacrebleu"]
    with pytest.raises(UserError, match="jiwer"):
        checks.check_scoring_libraries(config("asr"))
    assert asked[2:] == ["jiwer"]
    with pytest.raises(UserError, match="jiwer"):
        checks.check_scoring_libraries(config("asr", "erniekit"))
    asked.clear()
    with pytest.raises(UserError, match="jiwer"):  # what is held out of the training files is of their type
        checks.check_scoring_libraries(config("erniekit", train=("asr",), split=0.1))
    assert asked == ["jiwer"]


def test_packed_data_is_packed_no_more() -> None:
    checks.refuse_packed_data(_config())
    with pytest.raises(UserError, match="packed already"):
        checks.refuse_packed_data(_config(train_dataset_type="packed"))
    with pytest.raises(UserError, match="differ from epoch to epoch"):
        checks.refuse_packed_data(_config(stage="TTS"))


def _json(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_keys_that_are_to_be_ignored_are(tiny_base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    _json(folder, hidden_act="relu6", some_new_scaling=2.0)
    keys = {"ignore_config_keys": ["some_new_scaling"]}
    for read in (lambda config: checks.read_local_model(config, folder),
                 lambda config: checks.reference_config(config, ModelConfig.from_folder(tiny_base))):  # fmt: skip
        for values, ignored in (({}, False), (keys, True)):
            config = _config(stage="DPO", ref_model_name_or_path=str(folder), **values)
            with pytest.raises(UserError) as refused:
                read(config)
            assert ("some_new_scaling" in str(refused.value)) != ignored


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"continue_training": True}, "model"),
        ({"continue_training": True, "init_from_checkpoint": "weights"}, "weights"),
    ],
)
def test_where_weights_come_from(
    values: dict[str, Any], expected: str | None, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    assert checks.local_weights(make_config(**values), Path("model")) == (Path(expected) if expected else None)


def test_weights_that_are_fetched_later_are_not_missed(make_config: Callable[..., Config], tmp_path: Path) -> None:
    """Before a run begins, a model of a store is here without weights; a folder of this machine has to have them."""
    (tmp_path / "config.json").write_text("{}")
    of_store = make_config(model_name_or_path="file:///bucket/model", continue_training=True)
    assert checks.local_weights(of_store, tmp_path) is None
    assert checks.local_weights(make_config(continue_training=True), tmp_path) == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert checks.local_weights(of_store, tmp_path) == tmp_path


def test_a_reference_is_the_model_that_is_named(tiny_base: Path) -> None:
    own = ModelConfig.from_folder(tiny_base)
    assert checks.reference_config(_config(stage="DPO"), own) is None
    named = _config(stage="DPO", ref_model_name_or_path=str(tiny_base))
    assert checks.reference_config(named, replace(own, num_hidden_layers=1)) == own


@pytest.mark.parametrize(
    ("values", "rows", "length"),
    [
        ({}, 2, 128),
        ({"per_device_train_batch_size": 3}, 3, 128),
        ({"per_device_eval_batch_size": 5}, 5, 128),
        ({"max_seq_len": 64}, 2, 64),
        ({"packing": False}, 2, 100),
        ({"packing": False, "batch_tokens": 500}, 5, 100),
    ],
    ids=str,
)
def test_the_dense_mask_is_as_large_as_the_largest_batch(
    values: dict[str, Any], rows: int, length: int, make_config: Callable[..., Config]
) -> None:
    config = make_config(**{"per_device_eval_batch_size": 1, "use_flash_attention": False, **values})
    dataset: Any = SimpleNamespace(longest=np.array([60, 100, 80]))
    assert checks.dense_mask_size(config, dataset, dataset) == 4 * rows * length**2


def test_the_largest_mask_is_that_of_training_or_evaluation(make_config: Callable[..., Config]) -> None:
    data: Any = SimpleNamespace(longest=np.array([500]))
    config = make_config(per_device_train_batch_size=3, per_device_eval_batch_size=5)
    assert checks.dense_mask_size(config, data) == 4 * 3 * 128**2
    assert checks.dense_mask_size(config, None, data) == 4 * 5 * 128**2


@pytest.mark.parametrize(
    ("name", "value"), [("batch_seconds", 40.0), ("sample_order", "speaker"), ("curriculum", "duration")]
)
def test_what_makes_batches_of_recordings_is_recorded(
    name: str, value: object, make_config: Callable[..., Config]
) -> None:
    batches = checks.batch_settings(make_config(stage="TTS", **{name: value}), 1)
    assert batches[name] == value and name not in checks.batch_settings(make_config(stage="TTS"), 1)


@pytest.mark.parametrize("values", [{"seed": 7}, {"gradient_accumulation_steps": 3}, {"max_seq_len": 64}], ids=str)
def test_a_checkpoint_goes_on_with_its_own_batches(
    values: dict[str, Any], make_config: Callable[..., Config], tmp_path: Path
) -> None:
    plain = make_config()
    stored = RunIdentity(
        seed=plain.training.seed, data_fingerprint="", batches=checks.batch_settings(plain, 1), cpu_settings={},
        versions={}, base_weights="",
    )  # fmt: skip
    (tmp_path / IDENTITY_FILE).write_text(json.dumps(stored.to_json()))
    checks.refuse_other_batches(plain, 1, tmp_path)
    checks.refuse_other_batches(make_config(gradient_accumulation_steps=3), None, tmp_path)
    with pytest.raises(UserError, match=next(iter(values))):
        checks.refuse_other_batches(make_config(**values), 1, tmp_path)


@pytest.mark.proves("train_dataset_type", "eval_dataset_type")
def test_only_aligned_units_need_tokens_of_units(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(checks, "load_tokenizer", lambda folder: folder)
    monkeypatch.setattr(checks, "unit_tokens_of", lambda config, tokenizer: asked.append(tokenizer))
    checks.check_unit_tokens(_config(train_dataset_type="messages"), tmp_path)
    assert not asked
    checks.check_unit_tokens(_config(train_dataset_type="aligned_units"), tmp_path)
    held_out = {"do_eval": True, "eval_dataset_path": "e", "eval_dataset_type": "aligned_units"}
    checks.check_unit_tokens(_config(train_dataset_type="messages", **held_out), tmp_path)
    assert asked == [tmp_path, tmp_path]


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"])
def test_whatever_makes_answers_makes_groups(name: str) -> None:
    answering = {"stage": "GRPO", "rewards": "exact_match", "num_generations": 12}
    one = dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"), 1)
    checks.check_groups(_config(**answering, **one | {name: 12}), 1)
    checks.check_groups(_config(**answering, **one | {name: 4}), 3)
    said = rf"a rollout has 4 answers, 4 \({name}\), which are no whole groups(?s:.)* a multiple of 12\."
    told = rf"`num_generations: 12`: {said}"
    with pytest.raises(UserError, match=told):
        checks.check_groups(_config(**answering, **one | {name: 4}), 1)


@pytest.mark.parametrize(
    ("values", "ranks", "prompts"),
    [
        ({}, 1, 1),
        ({}, 3, 3),
        ({"per_device_train_batch_size": 4}, 1, 2),
        ({"gradient_accumulation_steps": 3}, 1, 3),
        ({"steps_per_generation": 5}, 1, 5),
        ({"num_generations": 4, "steps_per_generation": 6}, 1, 3),
    ],
    ids=str,
)
def test_every_worker_has_a_prompt(
    values: dict[str, Any], ranks: int, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "is_importable", lambda name: True)
    rollout = {"num_generations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    answering = {"stage": "GRPO", "rewards": "exact_match", **rollout, "steps_per_generation": 1, **values}
    checks.check_rollout_workers(_config(**answering, rollout_workers=prompts), ranks)
    with pytest.raises(UserError, match=rf"a rollout has {prompts} prompts"):
        checks.check_rollout_workers(_config(**answering, rollout_workers=prompts + 1), ranks)
