"""From the parameters of a run to its topology. Needs neither Paddle nor NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.errors import ConfigurationError
from erniekit.parallel.topology import ExpertAxis, Topology

if TYPE_CHECKING:
    from erniekit.parameters import Config

EXPERT_AXES: dict[str, ExpertAxis | None] = {"dummy": None, "mp": "tensor", "data": "data"}  # by moe_group
DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree", "virtual_pp_degree")


def topology_from(config: Config, world_size: int | None = None) -> Topology:
    """The layout that a configuration asks for on `world_size` ranks; data parallelism takes what the degrees leave.

    Args:
        world_size: the number of ranks; None: as few as the degrees need.

    Raises:
        ConfigurationError: the degrees contradict each other or do not divide the number of ranks. The message ends
            with where each degree was written.
    """
    section = config.distributed
    try:
        if section.sharding == "none" and section.sharding_parallel_degree > 1:
            raise ConfigurationError(
                f"sharding_parallel_degree is {section.sharding_parallel_degree}, and sharding does not say what its "
                "ranks divide between them\n  write sharding: stage1 (optimizer states), stage2 (gradients, too) or "
                "stage3 (parameters, too); or sharding_parallel_degree: 1 for plain data parallelism"
            )
        least = Topology(
            tensor=section.tensor_parallel_degree,
            pipeline=section.pipeline_parallel_degree,
            sharding=section.sharding_parallel_degree,
            expert_axis=EXPERT_AXES[section.moe_group],
            sequence_parallel=section.sequence_parallel,
            virtual_pipeline=section.virtual_pp_degree if section.pipeline_parallel_degree > 1 else 1,
        )
        return least if world_size is None else least.on(world_size)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}{_origins(config)}") from None


def _origins(config: Config) -> str:
    """Where the degrees were written, as a last line; nothing where none was."""
    names = [name for name in DEGREES if config.is_set(name)]
    written = ", ".join(f"{name} {config[name]} ({config.origin(name)})" for name in names)
    return f"\n  written: {written}" if written else ""
