"""Build the distributed parts of a run: topology and mesh, model shards, optimizer, and collectives of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paddle import Tensor

from erniekit.build.layout import partition_layers
from erniekit.config import Config
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.decoder_pipeline import DecoderPipeline, build_pipeline_stage
from erniekit.distributed.experts import expert_ranks
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import Mesh
from erniekit.distributed.pipeline import PipelineOptions
from erniekit.distributed.replicated import SYNC_FLAGS, ReplicatedParameterSync
from erniekit.distributed.sharding import ShardedOptimizer, shard_model
from erniekit.distributed.topology import AXES, PARAMETER, Topology, topology_from
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.parts import part_of
from erniekit.model.decoder import Decoder, last_stage_needs_embedding
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.optim.adamw import (
    StatefulAdamW,
    create_state,
    stateless_optimizer,
    trainable_parameters,
)
from erniekit.training.optim.offload import MomentStorage, StoredMomentsAdamW

# The optimizer of a run, from sections 1.3, 1.5 and 2.4.


def moment_storage(config: Config) -> MomentStorage | None:
    """Return how AdamW's moments are stored; None for Paddle's AdamW."""
    narrow, one_at_a_time = config.fp8.use_lowprecision_moment, config.fp8.tensorwise_offload_optimizer
    away = config.memory.offload_optim or one_at_a_time
    if not (config.training.optim == "adamw_custom" or narrow or away):
        return None
    return MomentStorage(narrow, config.output_dir if away else None, one_at_a_time)


def adamw_of(config: Config, parameters: Mapping[str, Tensor], model_config: ModelConfig) -> StatefulAdamW:
    """Build AdamW for the trainable tensors in `parameters`, without optimizer states."""
    storage = moment_storage(config)
    make = StatefulAdamW if storage is None else partial(StoredMomentsAdamW, storage)
    return stateless_optimizer(
        parameters,
        config.training,
        make,
        num_layers=model_config.num_hidden_layers,
        lora_plus_scale=config.lora.lora_plus_scale,
        part_of=partial(part_of, model_config.architecture),
    )


SHARDING_LAYOUT_WORDS = ("split_param", "enable_stage1_tensor_fusion")  # flags that decide which values a rank updates


def topology_and_rank(config: Config, model_config: ModelConfig) -> tuple[Topology, int]:
    """Return the topology of the run and the rank of this process, before any process group exists.

    Without a launcher the world size is 1.

    Raises:
        ConfigurationError: the configured degrees do not divide the ranks or the model.
    """
    topology = topology_from(config, int(os.environ.get("PADDLE_TRAINERS_NUM", 1)))
    partition_layers(config, model_config, topology)
    return topology, int(os.environ.get("PADDLE_TRAINER_ID", 0))


def join_ranks(config: Config, topology: Topology) -> Mesh:
    """Create the process groups with the other ranks."""
    return init_mesh(topology, timeout=config.distributed.distributed_timeout)


def model_shard_arguments(config: Config, model_config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Return the shard of the model that this rank holds, as arguments of `build_model`."""
    way, section = config.acceleration.moe_multimodal_dispatch_use_allgather, config.distributed
    layers = model_config.num_hidden_layers
    return {
        "dp_rank": mesh.dp_rank,
        "dp_world_size": mesh.topology.dp_world_size,
        "tp": replace(mesh.tp, skip_c_identity="enable_mp_skip_c_identity" in section.tensor_parallel_config),
        "expert_parallel": expert_ranks(mesh, gather="allgather" in way, padded=not way.endswith("unpad")),
        "pipeline_stage": build_pipeline_stage(layers, mesh, section.pp_seg_method, section.add_tail_layers),
        "all_gather_object": mesh.all_gather_object,
        "all_reduce_max": mesh.maximum,
    }


def optimizer_and_ranks(
    config: Config, mesh: Mesh, model: Decoder, parameters: Mapping[str, Tensor]
) -> tuple[Any, Ranks]:
    """Build the optimizer of this rank, and the collectives that a step uses.

    Args:
        parameters: the trained weights of this rank, by name.
    """
    section, topology = config.distributed, mesh.topology
    adamw = adamw_of(config, parameters, model.config)
    if topology.world_size == 1:
        create_state(adamw, adamw._parameter_list)
        return adamw, SINGLE_PROCESS
    sharding_strategy = replicated_sync = None
    # the ranks of a sharding group may all be without adapters, such as those of one pipeline stage
    if topology.sharding > 1 and trainable_parameters(parameters):
        group, words = mesh.group("sharding"), section.sharding_parallel_config
        sharding_strategy = shard_model(
            section.sharding,
            adamw,
            model,
            parameters,
            group,
            split="split_param" in words,
            fused="enable_stage1_tensor_fusion" in words,
            release=config.memory.release_grads,
        )
        optimizer: Any = ShardedOptimizer(adamw, sharding_strategy, parameters, group)
    else:
        optimizer = adamw
        create_state(adamw, adamw._parameter_list)
    words = tuple(
        word
        for word in section.tensor_parallel_config
        if word != "sync_moment" or not isinstance(adamw, StoredMomentsAdamW)  # the configuration has told so
    )
    if topology.tensor > 1 and SYNC_FLAGS.intersection(words):
        trained, updated = trainable_parameters(parameters), None
        if sharding_strategy is not None:
            param_shards = {
                name: sharding_strategy.param_shard(parameter).tensor for name, parameter in trained.items()
            }
            updated = {name: tensor for name, tensor in param_shards.items() if tensor is not None}

        def state(kind: str, tensor: Tensor) -> Tensor:
            return adamw.read(tensor.name, kind)

        replicated_sync = ReplicatedParameterSync(
            model.config.architecture, trained, state, mesh.group("tensor"), words, updated
        )
    in_backward = topology.sequence_parallel and not section.use_sp_callback
    return optimizer, LayoutRanks(
        mesh,
        parameters,
        model.config.architecture,
        sharding_strategy=sharding_strategy,
        pipeline=_pipeline(config, mesh, model),
        replicated_sync=replicated_sync,
        sum_in_backward=in_backward,
        layout=_layout_record(config, topology),
    )


def _layout_record(config: Config, topology: Topology) -> dict[str, Any]:
    """Return the parameters that decide which shard a rank of a training run has; degrees of 1 are left out."""
    section = config.distributed
    layout_record: dict[str, Any] = {"ranks": topology.world_size}
    layout_record |= {PARAMETER[axis]: topology.degree(axis) for axis in AXES if topology.degree(axis) > 1}
    if topology.pipeline > 1:
        names = ("virtual_pp_degree", "pp_seg_method", "add_tail_layers")
        layout_record |= {name: config[name] for name in names}
    if topology.sharding > 1:
        layout_words = [word for word in section.sharding_parallel_config if word in SHARDING_LAYOUT_WORDS]
        layout_record |= {"sharding": section.sharding, "sharding_parallel_config": " ".join(sorted(layout_words))}
    if topology.expert > 1:
        layout_record["moe_group"] = {"tensor": "mp", "data": "data"}[str(topology.expert_axis)]
    return layout_record


def evaluation_ranks(config: Config, mesh: Mesh, model: Decoder) -> Ranks:
    """Return the collectives of an evaluation without training, in which only the model is sharded."""
    if mesh.topology.world_size == 1:
        return SINGLE_PROCESS
    return LayoutRanks(mesh, {}, model.config.architecture, pipeline=_pipeline(config, mesh, model))


def _pipeline(config: Config, mesh: Mesh, model: Decoder) -> DecoderPipeline | None:
    if mesh.topology.pipeline == 1:
        return None
    words = config.distributed.pipeline_parallel_config
    options = PipelineOptions.from_flags(words, fixed_shape=_padding_is_harmless(config))
    return DecoderPipeline(mesh, options, tied_embeddings=last_stage_needs_embedding(model.config))


def _padding_is_harmless(config: Config) -> bool:
    """Return whether micro-batches may be padded to one length, which changes the masks of dropout."""
    basic, interleaved = config.basic, config.distributed.virtual_pp_degree > 1
    dropout = basic.hidden_dropout_prob or basic.attention_probs_dropout_prob or config.lora.lora_dropout
    return interleaved or not dropout
