"""The layout of a configuration and its estimated memory as numbers, which the page draws."""

from __future__ import annotations

from typing import Any

from erniekit.build.layout import describe_formats, known_model_config, number_formats, plan_layout
from erniekit.config import Config
from erniekit.distributed.stages import stage_layers
from erniekit.distributed.topology import AXES, Topology, topology_from
from erniekit.model.lora.config import adapter_parameter_count

MOST_RANKS = 64  # that are drawn one by one


def layout_of(config: Config, ranks: int | None) -> dict[str, Any]:
    """Return the topology, the memory of a rank of each stage (bytes by purpose), the bubble and the traffic.

    Args:
        ranks: their number; None: as few as the degrees need.

    Raises:
        ConfigurationError: the degrees do not divide the ranks or the model.
    """
    topology, model = topology_from(config, ranks), known_model_config(config)
    shown: dict[str, Any] = {
        "ranks": topology.world_size,
        "degrees": {axis: topology.degree(axis) for axis in AXES},
        "places": [_place(topology, rank) for rank in range(min(topology.world_size, MOST_RANKS))],
    }
    if isinstance(model, str):
        return {**shown, "unknown": model}
    plan = plan_layout(config, model, ranks)
    adapters = plan.work.adapters
    return {
        **shown,
        "unknown": "",
        "parameters": model.parameter_count(),
        "trained": adapter_parameter_count(model, adapters) if adapters else None,
        "formats": describe_formats(number_formats(config)),
        "not_counted": plan.not_counted,
        "bubble": plan.bubble,
        "traffic": {axis: size for axis, size in plan.max_traffic.items() if size},
        "tokens": plan.work.tokens * plan.work.accumulation * topology.dp_world_size,
        "stages": [
            {
                "layers": _ranges(stage_layers(plan.model_chunks, number, topology.pipeline)),
                "memory": {purpose: size for purpose, size in memory.items() if size and purpose != "total"},
                "total": memory["total"],
            }
            for number, memory in enumerate(plan.memory)
        ],
    }


def _place(topology: Topology, rank: int) -> dict[str, int]:
    coordinates = topology.coordinates(rank)
    return {"rank": rank, "batch": topology.dp_rank_of(rank), **{axis: getattr(coordinates, axis) for axis in AXES}}


def _ranges(layers: list[int]) -> str:
    """Format the layers of a stage, such as "0-11" or "0-5, 12-17"."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
