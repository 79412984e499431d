"""Each check reads what the configuration says, and its message repeats it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from erniekit.build import checks
from erniekit.config import Config
from erniekit.distributed.topology import Topology, topology_from
from erniekit.errors import UserError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model

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
LORA = {"lora": True, "continue_training": True}
NO_BIAS = "the routers of qwen3_moe have no correction bias"

WARNINGS: dict[str, tuple[ModelConfig, dict[str, Any], list[str]]] = {
    "nothing": (EXPERTS, {}, []),
    "recompute": (
        DENSE, {"recompute": True, "no_recompute_layers": 18},
        ["`no_recompute_layers: 18` leaves no layer to recompute: the model has 18, so `recompute: true` has no effect"],
    ),
    "recompute of one layer": (DENSE, {"recompute": True, "no_recompute_layers": 17}, []),
    "no recompute": (DENSE, {"no_recompute_layers": 18}, []),
    "a mix for experts": (
        DENSE, LORA | {"weight_quantize_algo": "weight_only_mix"},
        ["`weight_quantize_algo: weight_only_mix` is weight_only_int8 here: ernie4_5 has no experts, whose weights it "
         "stores in int4"],
    ),
    "adapters leave routers": (
        EXPERTS, LORA | {"moe_router_bias_update_rate": 0.5, "moe_orthogonal_loss_lambda": 0.1},
        ["`moe_orthogonal_loss_lambda: 0.1` has no effect: adapters leave routers unchanged",
         "`moe_router_bias_update_rate: 0.5` has no effect: adapters leave routers unchanged"],
    ),
    "no bias to move": (
        FREE_OF_BIAS, {"moe_router_bias_update_rate": 0.5},
        [f"`moe_router_bias_update_rate: 0.5` has no effect: {NO_BIAS}"],
    ),
    "no bias to leave": (
        FREE_OF_BIAS, {"moe_use_aux_free": False}, [f"`moe_use_aux_free: false` has no effect: {NO_BIAS}"],
    ),
    "a bias that comes back": (
        EXPERTS, LORA | {"moe_use_aux_free": False},
        ["moe_use_aux_free: adapters hold no router, so merging them brings the correction bias back"],
    ),
    "no bias": (EXPERTS, {"moe_use_aux_free": False}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_what_has_no_effect_on_the_model_is_told(case: str) -> None:
    model, values, lines = WARNINGS[case]
    model = replace(model, num_nextn_predict_layers=0)
    assert checks.model_warnings(_config(**values), model, stored_mtp_layers=0) == lines


@pytest.mark.parametrize(
    ("group", "ranks", "lines"),
    [
        ("mp", 2, ["`moe_group: mp` has no effect: tensor_parallel_degree is 1"]),
        ("data", 1, ["`moe_group: data` has no effect: no two ranks train on different data"]),
        ("data", 2, []),
    ],
)
def test_groups_of_experts_that_are_none_are_told(group: str, ranks: int, lines: list[str]) -> None:
    config = _config(moe_group=group)
    assert checks.expert_parallel_warnings(config, EXPERTS, topology_from(config, ranks)) == lines


def test_unequal_stages_are_told() -> None:
    def notes(**values: Any) -> list[str]:
        config = _config(pipeline_parallel_degree=4, **values)
        return checks.pipeline_notes(config, DENSE, topology_from(config))

    (line,) = notes()
    assert "`pp_seg_method: layer:DecoderLayer` is read as uniform: 18 layers cannot be divided equally" in line
    assert notes(add_tail_layers=2) == notes(pp_seg_method="uniform") == []


def test_positions_of_the_model_are_enough() -> None:
    checks.check_positions(_config(max_seq_len=64), replace(DENSE, max_position_embeddings=64))
    with pytest.raises(UserError, match="max_seq_len 65 .* exceeds the model's max_position_embeddings 64"):
        checks.check_positions(_config(max_seq_len=65), replace(DENSE, max_position_embeddings=64))


def test_layers_of_prediction_are_those_of_the_weights_or_new() -> None:
    model, asked = replace(EXPERTS, num_nextn_predict_layers=1), {"num_nextn_predict_layers": 2}
    assert checks.with_mtp_layers(model, _config(num_nextn_predict_layers=1)).num_nextn_predict_layers == 1
    assert checks.with_mtp_layers(model, _config(**asked, continue_training=False)).num_nextn_predict_layers == 2
    with pytest.raises(UserError, match="num_nextn_predict_layers 2 .* the model has 1 multi-token"):
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


def test_packed_data_is_packed_no_more() -> None:
    checks.refuse_packed_data(_config())
    with pytest.raises(UserError, match="packed already"):
        checks.refuse_packed_data(_config(train_dataset_type="packed"))


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


def test_a_reference_is_the_model_that_is_named(tiny_base: Path) -> None:
    own = ModelConfig.from_folder(tiny_base)
    assert checks.reference_config(_config(stage="DPO"), own) is None
    named = _config(stage="DPO", ref_model_name_or_path=str(tiny_base))
    assert checks.reference_config(named, replace(own, num_hidden_layers=1)) == own


def test_one_process_needs_no_stages() -> None:
    assert checks.pipeline_notes(_config(), DENSE, Topology()) == []
