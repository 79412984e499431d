"""What of a configuration reaches the parts of a layout, without any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import distributed
from erniekit.config import Config
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.training.optim.offload import MomentStorage

FOLDER = Path("o")


def _config(**values: Any) -> Config:
    return Config.from_mapping({"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t"} | values)


@pytest.mark.parametrize(
    ("values", "storage"),
    [
        ({}, None),
        ({"optim": "adamw_custom"}, MomentStorage(False, None, False)),
        ({"use_lowprecision_moment": True}, MomentStorage(True, None, False)),
        ({"offload_optim": True}, MomentStorage(False, FOLDER, False)),
        ({"tensorwise_offload_optimizer": True}, MomentStorage(False, FOLDER, True)),
    ],
    ids=str,
)
def test_where_moments_are_kept(values: dict[str, Any], storage: MomentStorage | None) -> None:
    assert distributed.moment_storage(_config(**values)) == storage


PIPELINE, SHARDED = Topology(pipeline=2), Topology(sharding=2)
CUT = {"pipeline_parallel_degree": 2}
OF_STAGES = {"ranks": 2, "pipeline_parallel_degree": 2, "virtual_pp_degree": 1, "add_tail_layers": 0,
             "pp_seg_method": "layer:DecoderLayer"}  # fmt: skip
OF_SHARDS = {"ranks": 2, "sharding_parallel_degree": 2, "sharding": "stage1", "sharding_parallel_config": ""}
STAGE1 = {"sharding": "stage1", "sharding_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}


@pytest.mark.parametrize(
    ("topology", "values", "record"),
    [
        (Topology(), {}, {"ranks": 1}),
        (PIPELINE, CUT, OF_STAGES),
        (PIPELINE, CUT | {"pp_seg_method": "uniform"}, OF_STAGES | {"pp_seg_method": "uniform"}),
        (PIPELINE, CUT | {"add_tail_layers": 1}, OF_STAGES | {"add_tail_layers": 1}),
        (SHARDED, STAGE1, OF_SHARDS),
        (SHARDED, STAGE1 | {"sharding": "stage2"}, OF_SHARDS | {"sharding": "stage2"}),
        (
            SHARDED, STAGE1 | {"sharding_parallel_config": "split_param enable_stage1_overlap"},
            OF_SHARDS | {"sharding_parallel_config": "split_param"},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_decides_which_shard_a_rank_has(
    topology: Topology, values: dict[str, Any], record: dict[str, Any]
) -> None:
    assert distributed._layout_record(_config(**values), topology) == record


@pytest.mark.parametrize(
    ("values", "harmless"),
    [
        ({}, True),
        ({"hidden_dropout_prob": 0.1}, False),
        ({"attention_probs_dropout_prob": 0.1}, False),
        ({"lora": True, "lora_dropout": 0.1}, False),
        ({"hidden_dropout_prob": 0.1, "pipeline_parallel_degree": 3, "virtual_pp_degree": 2}, True),
    ],
    ids=str,
)
def test_dropout_decides_whether_batches_may_be_padded(values: dict[str, Any], harmless: bool) -> None:
    assert distributed._padding_is_harmless(_config(**values)) is harmless


@pytest.mark.parametrize(
    ("values", "argument", "seen"),
    [
        ({"moe_multimodal_dispatch_use_allgather": "v2-allgather"}, "gather", True),
        ({"moe_multimodal_dispatch_use_allgather": "v2-alltoall"}, "gather", False),
        ({"moe_multimodal_dispatch_use_allgather": "v2-alltoall"}, "padded", True),
        ({"moe_multimodal_dispatch_use_allgather": "v2-alltoall-unpad"}, "padded", False),
        ({}, "method", "layer:DecoderLayer"),
        ({"pp_seg_method": "uniform"}, "method", "uniform"),
        ({"add_tail_layers": 2}, "tail", 2),
        ({"tensor_parallel_config": "enable_mp_skip_c_identity"}, "skip_c_identity", True),
        ({}, "skip_c_identity", False),
    ],
    ids=str,
)
def test_what_a_shard_of_the_model_is_told(
    values: dict[str, Any], argument: str, seen: Any, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(distributed, "expert_ranks", lambda mesh, **named: told.update(named))
    monkeypatch.setattr(
        distributed, "build_pipeline_stage",
        lambda layers, mesh, method, tail: told.update(layers=layers, method=method, tail=tail),
    )  # fmt: skip
    config, model = _config(**values), ModelConfig.from_folder(tiny_model)
    arguments = distributed.model_shard_arguments(config, model, SINGLE_PROCESS_MESH)
    told["skip_c_identity"] = arguments["tp"].skip_c_identity
    assert told["layers"] == 2 and told[argument] == seen


def test_ranks_wait_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "init_mesh", lambda topology, timeout: timeout)
    assert distributed.join_ranks(_config(distributed_timeout=7), Topology()) == 7


def test_a_pipeline_has_the_options_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Config], tiny_model: Path
) -> None:
    monkeypatch.setattr(distributed, "DecoderPipeline", lambda mesh, options, tied_embeddings: options)
    mesh: Any = SimpleNamespace(topology=PIPELINE)
    model: Any = SimpleNamespace(config=ModelConfig.from_folder(tiny_model))

    def options(**values: Any) -> Any:
        return distributed._pipeline(make_config(pipeline_parallel_degree=2, **values), mesh, model)

    assert options(pipeline_parallel_config="disable_partial_send_recv") == replace(options(), partial=False)
    assert options(hidden_dropout_prob=0.1) == replace(options(), fixed_shape=False)


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({}, {"level": "stage1", "split": False, "fused": False, "release": False, "in_backward": True}),
        ({"sharding": "stage2"}, {"level": "stage2"}),
        ({"sharding_parallel_config": "split_param"}, {"split": True}),
        ({"sharding_parallel_config": "enable_stage1_tensor_fusion"}, {"fused": True}),
        ({"release_grads": True}, {"release": True}),
        (TENSOR | {"use_sp_callback": True}, {"in_backward": False}),
        (TENSOR | {"tensor_parallel_config": "sync_grad"}, {"words": ("sync_grad",)}),
        ({"lora": True, "continue_training": True, "lora_plus_scale": 4.0}, {"scale": 4.0}),
    ],
    ids=str,
)
def test_what_the_optimizer_of_a_rank_is_told(
    values: dict[str, Any], seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def stateless_optimizer(
        parameters: Any, section: Any, make: Any, *, num_layers: int, lora_plus_scale: float, part_of: Any
    ) -> Any:
        told["scale"] = lora_plus_scale
        return SimpleNamespace(_parameter_list=[])

    def shard_model(level: str, *parts: Any, **named: bool) -> Any:
        told.update(named, level=level)
        return SimpleNamespace(param_shard=lambda parameter: SimpleNamespace(tensor=parameter))

    replacements = {
        "stateless_optimizer": stateless_optimizer,
        "shard_model": shard_model,
        "trainable_parameters": dict,
        "ShardedOptimizer": lambda *parts: None,
        "ReplicatedParameterSync": lambda architecture, trained, state, group, words, updated: told.update(words=words),
        "LayoutRanks": lambda *parts, **named: told.update(in_backward=named["sum_in_backward"]),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(distributed, name, replacement)
    topology = Topology(tensor=2, sharding=2, sequence_parallel=True)
    mesh: Any = SimpleNamespace(topology=topology, group=lambda *axes: None)
    model: Any = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2, architecture=None))
    config = _config(**(STAGE1 | values))
    distributed.optimizer_and_ranks(config, mesh, model, {"weight": None})
    assert told | seen == told
