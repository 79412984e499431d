"""What a run tells in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from erniekit.build import notes
from erniekit.config import Config
from erniekit.distributed.topology import Topology, topology_from
from erniekit.model.architectures.model_config import ModelConfig
from tests.build.test_checks import DENSE, EXPERTS, FREE_OF_BIAS, GELU, LORA, NO_BIAS, _config

WARNINGS: dict[str, tuple[ModelConfig, dict[str, Any], list[str]]] = {
    "nothing": (EXPERTS, {}, []),
    "recompute": (
        DENSE, {"recompute": True, "no_recompute_layers": 18},
        ["`no_recompute_layers: 18` leaves no layer to recompute: the model has 18, so `recompute: true` has no "
         "effect"],
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
    "another activation": (
        GELU, {"fuse_swiglu": True},
        [f"`fuse_swiglu: true` has no effect: {GELU.model_type} computes {GELU.architecture.activation} in its place"],
    ),
    "no bias": (EXPERTS, {"moe_use_aux_free": False}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_what_has_no_effect_on_the_model_is_told(case: str) -> None:
    model, values, lines = WARNINGS[case]
    model = replace(model, num_nextn_predict_layers=0)
    assert notes.model_notes(_config(**values), model, stored_mtp_layers=0) == lines


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
    assert notes.expert_parallel_notes(config, EXPERTS, topology_from(config, ranks)) == lines


def test_unequal_stages_are_told() -> None:
    def told(**values: Any) -> list[str]:
        config = _config(pipeline_parallel_degree=4, **values)
        return notes.pipeline_notes(config, DENSE, topology_from(config))

    (line,) = told()
    assert "`pp_seg_method: layer:DecoderLayer` is read as uniform: 18 layers cannot be divided equally" in line
    assert told(add_tail_layers=2) == told(pp_seg_method="uniform") == []


def test_one_process_needs_no_stages() -> None:
    assert notes.pipeline_notes(_config(), DENSE, Topology()) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, ""),
        ({"save_strategy": "no"}, "save_strategy is no: this run writes no checkpoint"),
        ({"save_strategy": "no", "do_train": False, "do_eval": True, "eval_dataset_path": "e"}, ""),
        ({"stage": "DPO"}, "normalize_logps is false: sigmoid sums"),
        ({"stage": "DPO", "loss_type": "ipo"}, "normalize_logps is false: ipo sums"),
        ({"stage": "DPO", "loss_type": "simpo"}, ""),
        ({"stage": "DPO", "normalize_logps": False}, ""),
    ],
    ids=str,
)
def test_what_a_run_tells_before_it_begins(
    values: dict[str, Any], told: str, make_config: Callable[..., Config]
) -> None:
    lines = notes.run_notes(make_config(**{"save_strategy": "epoch", **values}))
    assert told in "".join(lines) and len(lines) == bool(told)
