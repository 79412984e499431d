"""A loss scale on ranks of which one alone sees a gradient overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.training import TrainingParameters
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.decoder_pipeline import DecoderPipeline, build_pipeline_stage
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.pipeline import PipelineOptions
from erniekit.distributed.sharding import ShardedOptimizer, shard_model
from erniekit.distributed.topology import Topology
from erniekit.model.builder import build_model
from erniekit.model.decoder import last_stage_needs_embedding
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.gradients import LossScale
from erniekit.training.objectives.objective import supervised
from erniekit.training.optim.adamw import build_optimizer, stateless_optimizer
from erniekit.training.step import train_step
from tests.distributed.cases.sharding import batch
from tests.model.tiny import tiny_config

LARGEST = 65504.0  # of float16
FIRST, SETTINGS = 2.0**34, TrainingParameters(weight_decay=0.1)
NAME = "model.layers.1.mlp.down_proj.weight"


def overflow(degrees: Mapping[str, int], sharding_level: str = "") -> dict[str, Any]:
    """Train one step, over again until nothing overflows.

    Returns:
        The scales of the attempts that this rank skipped, whether they left its weights alone, and the loss and the
        gradient norm of the one that it did not skip, beside those of one process without a scale.
    """
    mesh = init_mesh(Topology.from_degrees(2, **degrees), timeout=60)
    decoder, parameters, optimizer, ranks = _parts(mesh, sharding_level)
    if mesh.rank == 1:
        _narrow(parameters[NAME])
    scale, skipped, unchanged = LossScale(FIRST), [], True
    own = [batch(0, number) for number in range(4)][mesh.dp_rank :: mesh.topology.dp_world_size]
    before = _digest(parameters)
    while True:
        tried = scale.scale
        result = _step(decoder, parameters, optimizer, own, ranks, scale)
        if not result.overflowed:
            break
        skipped.append(tried)
        unchanged = unchanged and _digest(parameters) == before
    alone = _parts(SINGLE_PROCESS_MESH, "")
    expected = _step(*alone[:3], [batch(0, number) for number in range(4)], SINGLE_PROCESS, None)
    return {
        "skipped": skipped,
        "unchanged": unchanged and _digest(parameters) != before,
        "loss": [result.totals.loss, expected.totals.loss],
        "norm": [result.grad_norm, expected.grad_norm],
    }


def _step(decoder: Any, parameters: Any, optimizer: Any, batches: Any, ranks: Ranks, scale: LossScale | None) -> Any:
    return train_step(
        decoder,
        list(parameters.values()),
        optimizer,
        supervised(),
        batches,
        step=0,
        learning_rate=0.01,
        max_grad_norm=0.5,
        loss_scale=scale,
        ranks=ranks,
    )


def _parts(mesh: Mesh, sharding_level: str) -> tuple[Any, dict[str, paddle.Tensor], Any, Ranks]:
    config = tiny_config(vocab_size=56)
    pipeline_stage = build_pipeline_stage(config.num_hidden_layers, mesh, "uniform")
    decoder = build_model(config, None, seed=3, tp=mesh.tp, pipeline_stage=pipeline_stage)
    parameters = named_trainable_parameters(decoder)
    if mesh is SINGLE_PROCESS_MESH:
        return decoder, parameters, build_optimizer(parameters, SETTINGS), SINGLE_PROCESS
    if sharding_level:
        adamw, group = stateless_optimizer(parameters, SETTINGS), mesh.group("sharding")
        divided = shard_model(sharding_level, adamw, decoder, parameters, group)
        optimizer: Any = ShardedOptimizer(adamw, divided, parameters, group)
        return (
            decoder,
            parameters,
            optimizer,
            LayoutRanks(mesh, parameters, config.architecture, sharding_strategy=divided),
        )
    pipeline = None
    if mesh.topology.pipeline > 1:
        pipeline = DecoderPipeline(mesh, PipelineOptions(), tied_embeddings=last_stage_needs_embedding(config))
    return (
        decoder,
        parameters,
        build_optimizer(parameters, SETTINGS),
        LayoutRanks(mesh, parameters, config.architecture, pipeline=pipeline),
    )


def _narrow(parameter: paddle.Tensor) -> None:
    """Have what a gradient holds beyond the largest float16 become infinite."""

    def cut(gradient: paddle.Tensor) -> paddle.Tensor:
        values = gradient.numpy()
        return paddle.to_tensor(np.where(np.abs(values) > LARGEST, np.float32(np.inf), values))

    parameter.register_hook(cut)


def _digest(parameters: Mapping[str, paddle.Tensor]) -> list[float]:
    """A number for each weight; of what stage 3 has divided, for this rank's part."""
    own = [p if p._is_initialized() else p.fw_storage for p in parameters.values()]
    return [float(p.astype("float64").abs().sum()) for p in own]
