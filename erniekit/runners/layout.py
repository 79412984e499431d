"""The ranks of a run: which of them this process is, what it has of the model, what a step asks of the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddle import Tensor

from erniekit.errors import ConfigurationError
from erniekit.model.configuration import ModelConfig
from erniekit.model.decoder import Decoder, embedding_at_the_end
from erniekit.parallel.copies import SYNCHRONISED, Copies
from erniekit.parallel.decoder_pipeline import DecoderPipeline, stack_part
from erniekit.parallel.experts import expert_ranks
from erniekit.parallel.from_config import topology_from
from erniekit.parallel.mesh import Mesh
from erniekit.parallel.pipeline import PipelineOptions
from erniekit.parallel.ranks import LayoutRanks
from erniekit.parallel.sharding import DividedOptimizer, divide
from erniekit.parallel.start import start_ranks
from erniekit.parallel.topology import AXES, PARAMETER, Topology
from erniekit.parameters import Config
from erniekit.runners.layout_plan import divided_layers
from erniekit.runners.optimizer import adamw_of
from erniekit.training.moments import StoredMomentsAdamW
from erniekit.training.optimizer import create_state, trainable_parameters
from erniekit.training.ranks import SINGLE, Ranks
from erniekit.training.settings import optimizer_settings_from

LAID_OUT_BY = ("split_param", "enable_stage1_tensor_fusion")  # words that decide which values a rank updates


def own_place(config: Config, model_config: ModelConfig) -> tuple[Topology, int]:
    """The layout of the run, and which of its ranks this process is; known before any group forms.

    A process that no launcher has started is alone.

    Raises:
        ConfigurationError: ranks or model cannot be divided as the configuration says.
    """
    topology = topology_from(config, int(os.environ.get("PADDLE_TRAINERS_NUM", 1)))
    divided_layers(config, model_config, topology)
    return topology, int(os.environ.get("PADDLE_TRAINER_ID", 0))


def join_ranks(config: Config, topology: Topology) -> Mesh:
    """Form the groups with the other ranks."""
    return start_ranks(topology, timeout=config.distributed.distributed_timeout)


def model_division(config: Config, model_config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """What this rank has of a model, as arguments of `build_model`."""
    way, section = config.acceleration.moe_multimodal_dispatch_use_allgather, config.distributed
    layers = model_config.num_hidden_layers
    return {
        "reader": mesh.reader,
        "readers": mesh.topology.readers,
        "tensor": replace(mesh.tensor, skips_copies="enable_mp_skip_c_identity" in section.tensor_parallel_config),
        "experts": expert_ranks(mesh, gather="allgather" in way, padded=not way.endswith("unpad")),
        "part": stack_part(layers, mesh, section.pp_seg_method, section.add_tail_layers),
        "exchange": mesh.exchange,
        "maximum": mesh.maximum,
    }


def divided_training(config: Config, mesh: Mesh, model: Decoder, parameters: Mapping[str, Tensor]) -> tuple[Any, Ranks]:
    """The optimizer of this rank, and what a step asks of the others.

    Args:
        parameters: the trained weights of this rank, by name.
    """
    section, topology = config.distributed, mesh.topology
    settings = optimizer_settings_from(config, model.config.num_hidden_layers)
    adamw = adamw_of(config, parameters, settings)
    if topology.world_size == 1:
        create_state(adamw, adamw._parameter_list)
        return adamw, SINGLE
    stage = copies = None
    # a sharding group may be one without adapters, on all its ranks: of a stage, or of experts
    if topology.sharding > 1 and trainable_parameters(parameters):
        group, words = mesh.group("sharding"), section.sharding_parallel_config
        stage = divide(
            section.sharding,
            adamw,
            model,
            parameters,
            group,
            split="split_param" in words,
            fused="enable_stage1_tensor_fusion" in words,
            release=config.memory.release_grads,
        )
        optimizer: Any = DividedOptimizer(adamw, stage, parameters, group)
    else:
        optimizer = adamw
        create_state(adamw, adamw._parameter_list)
    words = section.tensor_parallel_config
    if isinstance(adamw, StoredMomentsAdamW) and "sync_moment" in words:
        raise ConfigurationError(
            "tensor_parallel_config: sync_moment cannot reach moments that are kept in fewer bits or away from the "
            "device.\n  Leave it out: ranks of a tensor-parallel group compute equal moments without it, too."
        )
    if topology.tensor > 1 and SYNCHRONISED.intersection(words):
        trained, updated = trainable_parameters(parameters), None
        if stage is not None:
            shares = {name: stage.share(parameter).tensor for name, parameter in trained.items()}
            updated = {name: tensor for name, tensor in shares.items() if tensor is not None}

        def state(kind: str, tensor: Tensor) -> Tensor:
            return adamw.read(tensor.name, kind)

        copies = Copies(trained, state, mesh.group("tensor"), words, updated)
    in_backward = topology.sequence_parallel and not section.use_sp_callback
    return optimizer, LayoutRanks(
        mesh,
        parameters,
        stage=stage,
        pipeline=_pipeline(config, mesh, model),
        copies=copies,
        sum_in_backward=in_backward,
        layout=_division(config, topology),
    )


def _division(config: Config, topology: Topology) -> dict[str, Any]:
    """By parameter, everything that decides what a rank of a training run has; what is not divided is left out."""
    section = config.distributed
    division: dict[str, Any] = {"ranks": topology.world_size}
    division |= {PARAMETER[axis]: topology.degree(axis) for axis in AXES if topology.degree(axis) > 1}
    if topology.pipeline > 1:
        names = ("virtual_pp_degree", "pp_seg_method", "add_tail_layers")
        division |= {name: config[name] for name in names}
    if topology.sharding > 1:
        laid_out = [word for word in section.sharding_parallel_config if word in LAID_OUT_BY]
        division |= {"sharding": section.sharding, "sharding_parallel_config": " ".join(sorted(laid_out))}
    if topology.expert > 1:
        division["moe_group"] = {"tensor": "mp", "data": "data"}[str(topology.expert_axis)]
    return division


def divided_evaluation(config: Config, mesh: Mesh, model: Decoder) -> Ranks:
    """What an evaluation on its own asks of the other ranks: nothing is trained, so only the model is divided."""
    if mesh.topology.world_size == 1:
        return SINGLE
    return LayoutRanks(mesh, {}, pipeline=_pipeline(config, mesh, model))


def _pipeline(config: Config, mesh: Mesh, model: Decoder) -> DecoderPipeline | None:
    if mesh.topology.pipeline == 1:
        return None
    words = config.distributed.pipeline_parallel_config
    options = PipelineOptions.from_words(words, fixed_shape=_padding_is_harmless(config))
    return DecoderPipeline(mesh, options, copied_embedding=embedding_at_the_end(model.config))


def _padding_is_harmless(config: Config) -> bool:
    """Whether micro-batches may be padded to one length, which changes the draws of dropout."""
    basic, interleaved = config.basic, config.distributed.virtual_pp_degree > 1
    dropout = basic.hidden_dropout_prob or basic.attention_probs_dropout_prob or config.lora.lora_dropout
    return interleaved or not dropout
