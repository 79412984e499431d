"""Where a layout cuts the layers of a model, from a configuration, without any rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import layout
from erniekit.build.layout import known_model_config, partition_layers, plan_layout, workload
from erniekit.config import Config
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig


@pytest.mark.proves("pp_seg_method")
@pytest.mark.parametrize(
    ("method", "layers"),
    [
        ("layer:DecoderLayer", [range(2), range(2, 4), range(4, 6)]),
        ("uniform", [range(2), range(2, 5), range(5, 6)]),  # embedding, norm and head count, too
        ([0, 1, 3], [range(0), range(2), range(2, 6)]),
    ],
)
def test_layers_are_divided_as_asked(
    method: Any, layers: list[range], make_config: Callable[..., Config], tiny_model: Any
) -> None:
    config = make_config(pipeline_parallel_degree=3, pp_seg_method=method)
    model = replace(ModelConfig.from_folder(tiny_model), num_hidden_layers=6)
    parts = partition_layers(config, model, Topology(pipeline=3))
    assert [list(part) for part in parts] == [list(part) for part in layers]


BFLOAT16 = {"bf16": True, "device": "gpu"}
SAVES = {"save_strategy": "steps", "save_steps": 2, "unified_checkpoint_config": "async_save"}
TINY = str(Path(__file__).parents[2] / "examples/models/tiny-ernie")
ANSWERS = {"rewards": ["exact_match"], "max_completion_len": 8}
OTHER = {"stage": "KTO", "reference_model": "copy", "ref_model_name_or_path": TINY}
COPY = {"stage": "DPO", "ref_model_update_steps": 2}
REACHES_THE_ESTIMATE: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # beside what, which values, which field
    ({}, {"per_device_train_batch_size": 3}, "batch_size"),
    ({}, {"batch_tokens": 1280}, "batch_size"),
    ({"batch_tokens": 1280}, {"max_seq_len": 64}, "batch_size"),
    ({}, {"max_seq_len": 64}, "max_seq_len"),
    ({}, {"gradient_accumulation_steps": 3}, "accumulation"),
    ({}, {"recompute": True}, "recompute"),
    ({"recompute": True}, {"no_recompute_layers": 1}, "no_recompute_layers"),
    ({"recompute": True}, {"recompute_granularity": "core_attn"}, "recompute_granularity"),
    ({}, {"use_fused_head_and_loss_fn": True}, "fused_head"),
    ({}, {"use_flash_attention": False}, "dense_mask"),
    ({}, {"lora": True}, "adapters"),
    ({"lora": True}, {"lora_rank": 2}, "adapters"),
    (COPY, {"ref_model_update_steps": -1}, "reference_copy"),
    (COPY, {"lora": True}, "reference_copy"),
    ({"stage": "GRPO", **ANSWERS}, {"beta": 0.1}, "reference_copy"),
    (OTHER, {"ref_model_name_or_path": None}, "reference"),
    (OTHER, {"ref_model_name_or_path": None}, "reference_copy"),
    (OTHER, {"reference_model": "precomputed"}, "reference"),
    ({"stage": "DISTILL", "teacher_model_name_or_path": TINY}, {"teacher_top_k": 4}, "teacher"),
    ({"stage": "GRPO", **ANSWERS}, {"rewards": ["exact_match", f"reward_model:{TINY}"]}, "reward_models"),
    ({}, {"sharding": "stage1", "sharding_parallel_degree": 2}, "sharding"),
    ({"lora": True}, {"weight_quantize_algo": "weight_only_int8"}, "weight_only"),
    (SAVES, {"save_strategy": "no"}, "checkpoint_value"),
    (SAVES, {"unified_checkpoint_config": ""}, "checkpoint_value"),
    (SAVES, {"ignore_save_lr_and_optim": True}, "checkpoint_value"),
    (SAVES, {"ckpt_quant_stage": "O1"}, "checkpoint_value"),
    ({}, {"offload_optim": True}, "formats"),
    ({}, {"tensorwise_offload_optimizer": True}, "formats"),
    ({}, {"use_lowprecision_moment": True}, "formats"),
    ({}, {"device": "gpu"}, "formats"),
    ({}, {"cpu_kernels": "paddle"}, "formats"),
    ({"device": "cpu"}, {"bf16": True}, "formats"),
    ({"device": "cpu"}, {"bf16": True, "cpu_bf16": "always"}, "formats"),
    ({"device": "gpu"}, {"bf16": True}, "formats"),
    ({"device": "gpu"}, {"fp16": True}, "formats"),
    (BFLOAT16, {"fp16_opt_level": "O2"}, "formats"),
    ({**BFLOAT16, "fp16_opt_level": "O2"}, {"amp_master_grad": True}, "formats"),
]


@pytest.mark.parametrize(("beside", "values", "field"), REACHES_THE_ESTIMATE, ids=lambda value: str(value))
def test_every_value_that_takes_memory_reaches_the_estimate(
    beside: dict[str, Any],
    values: dict[str, Any],
    field: str,
    make_config: Callable[..., Config],
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("erniekit.build.layout.processor_paths", lambda: ["avx512_bf16", "avx2"])
    model = ModelConfig.from_folder(tiny_model)
    common = {"continue_training": True} if "lora" in {**beside, **values} else {}
    plain = workload(make_config(**common, **beside), model)
    changed = workload(make_config(**common, **{**beside, **values}), model)
    assert getattr(changed, field) != getattr(plain, field)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"stage": "DISTILL", "teacher_model_name_or_path": "some/teacher", "from_hf_hub": True},
            "the teacher: some/teacher is not here yet",
        ),
        (
            {"stage": "DPO", "reference_model": "copy", "ref_model_name_or_path": "tests"},
            "the reference: .*config.json",
        ),
        (
            {"stage": "GRPO", **ANSWERS, "rewards": ["reward_model:none/rm"]},
            "the reward model: none/rm/config.json: no such file",
        ),
    ],
)
def test_what_the_estimate_leaves_out_is_told(
    values: dict[str, Any], told: str, make_config: Callable[..., Config], tiny_model: Any
) -> None:
    model = ModelConfig.from_folder(tiny_model)
    (missing,) = plan_layout(make_config(**values), model).not_counted
    assert re.match(told, missing)
    known = {"teacher_model_name_or_path": TINY, "ref_model_name_or_path": TINY, "rewards": [f"reward_model:{TINY}"]}
    named = {name: value for name, value in known.items() if name in values}
    assert plan_layout(make_config(**{**values, **named}), model).not_counted == ()


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({"max_seq_len": 64}, "max_seq_len", 64),
        ({"pp_seg_method": "uniform"}, "pp_seg_method", "uniform"),
        ({"add_tail_layers": 2}, "add_tail_layers", 2),
    ],
)
def test_what_must_be_divisible(
    values: dict[str, Any],
    argument: str,
    seen: Any,
    make_config: Callable[..., Config],
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "check_divisible", lambda model, topology, **named: named)
    told: Any = partition_layers(make_config(**values), ModelConfig.from_folder(tiny_model), Topology())
    assert told[argument] == seen


def test_keys_of_the_model_are_ignored_on_request(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelConfig, "from_folder", lambda folder, keys: SimpleNamespace(scored=False, ignored=keys))
    told: Any = known_model_config(make_config(ignore_config_keys=["some_key"]))
    assert told.ignored == ("some_key",)


def test_keys_of_other_models_are_ignored_on_request(
    make_config: Callable[..., Config], tiny_base: Path, tmp_path: Path
) -> None:
    stored = json.loads((tiny_base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"some_new_scaling": 2.0}))
    values = {"stage": "DPO", "reference_model": "copy", "ref_model_name_or_path": str(tmp_path)}
    ((role, refused),) = layout.other_models(make_config(**values))
    assert role == "reference" and isinstance(refused, str) and "some_new_scaling" in refused
    (found,) = layout.other_models(make_config(**values, ignore_config_keys=["some_new_scaling"]))
    assert found == ("reference", ModelConfig.from_folder(tiny_base))


@pytest.mark.parametrize(("values", "rounded"), [({}, 0), ({"cpu_bf16": "always"}, 2)], ids=str)
def test_a_processor_without_bfloat16_rounds_weights_where_that_is_asked(
    values: dict[str, str], rounded: int, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "processor_paths", lambda: ["avx2"])
    formats = layout.number_formats(make_config(device="cpu", bf16=True, **values))
    assert formats.rounded_weights == rounded


def test_seconds_of_a_batch_reach_the_estimate(
    make_config: Callable[..., Config], tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = SimpleNamespace(frame_rate=50.0)
    monkeypatch.setattr("erniekit.build.layout.codec_of_run", lambda config: codec)
    model = ModelConfig.from_folder(tiny_model)
    values = {"stage": "TTS", "batch_seconds": 10.0, "max_seq_len": 128, "per_device_train_batch_size": None}
    assert workload(make_config(**values), model).batch_size == 4  # 500 frames in rows of 128
    codec.frame_rate = 0.0  # not here
    assert workload(make_config(**values), model).batch_size == 1
