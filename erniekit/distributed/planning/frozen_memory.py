"""Estimate the memory of models that a run does not train and has beside the trained one. Needs no Paddle or NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.distributed.stages import layer_chunks, numel_on_rank, shapes_on_pp_stage
from erniekit.distributed.topology import Topology

if TYPE_CHECKING:
    from erniekit.distributed.planning.memory import Workload
    from erniekit.model.architectures.model_config import ModelConfig


def frozen_models(work: Workload, topology: Topology, pp_stage: int) -> dict[str, int]:
    """Return bytes by purpose on a rank: `reference`, where it has a shape of its own, `teacher` with what it says of
    a micro-batch, its last hidden states of at most every token, and `reward_models`.

    Sharding divides none of them, and every process has the whole of a reward model.
    """
    states = work.tokens * work.teacher.hidden_size if work.teacher else 0
    return {
        "reference": _weights(work.reference, work, topology, pp_stage),
        "teacher": _weights(work.teacher, work, topology, pp_stage) + states * work.formats.activations,
        "reward_models": sum(model.parameter_count() for model in work.reward_models) * work.formats.weights,
    }


def _weights(model: ModelConfig | None, work: Workload, topology: Topology, pp_stage: int) -> int:
    if model is None:
        return 0
    chunks = layer_chunks(model.num_hidden_layers, topology)
    shapes = shapes_on_pp_stage(model.weight_shapes(), model, topology, chunks, pp_stage)
    return numel_on_rank(shapes, model.architecture, topology) * (work.formats.weights + work.formats.rounded_weights)
