"""Convert between parallel degrees, ranks and groups: the one place where degrees meet the number of ranks.

Ranks are numbered like `paddle.distributed.fleet` does: data parallelism varies slowest, then pipeline stages,
sharding, and tensor parallelism fastest, so the ranks of a tensor-parallel group are neighbours on one machine.
(fleet's fifth axis, `sep`, lies between sharding and tensor and is always 1 here.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal

from erniekit.config.sections.distributed import ALL_RANKS, MOST_RANKS
from erniekit.errors import ConfigurationError

if TYPE_CHECKING:
    from erniekit.config import Config


Axis = Literal["data", "pipeline", "sharding", "tensor"]
AXES: tuple[Axis, ...] = ("data", "pipeline", "sharding", "tensor")  # slowest first, fleet's order
BATCH_AXES: tuple[Axis, ...] = ("data", "sharding")  # ranks that differ in these process different samples
MODEL_AXES: tuple[Axis, ...] = ("pipeline", "tensor")  # ranks that differ only in these process the same samples
ExpertAxis = Literal["tensor", "data"]
PARAMETER = {
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
    "sharding": "sharding_parallel_degree",
    "data": "the data-parallel degree",  # derived, so it has no parameter
    "virtual_pipeline": "virtual_pp_degree",
}
SMALLEST_INTERLEAVED_PIPELINE = 3  # fleet asserts more than two stages


@dataclass(frozen=True)
class Coordinates:
    """A rank's index on each axis, from 0."""

    data: int
    pipeline: int
    sharding: int
    tensor: int


@dataclass(frozen=True)
class Topology:
    """The layout of a run. `data x pipeline x sharding x tensor` is the number of ranks.

    Attributes:
        tensor: tensor-parallel degree: shards of every large matrix.
        pipeline: pipeline-parallel degree: consecutive stages of the stack of layers.
        sharding: ranks that shard optimizer states (and gradients, parameters); each processes its own data.
        data: replicas of all of that; each processes its own data.
        expert_axis: the axis whose ranks shard the experts; None: every rank has all experts.
        sequence_parallel: a tensor-parallel group shards activations between blocks along the sequence.
        virtual_pipeline: model chunks per stage (interleaved pipeline).
    """

    tensor: int = 1
    pipeline: int = 1
    sharding: int = 1
    data: int = 1
    expert_axis: ExpertAxis | None = None
    sequence_parallel: bool = False
    virtual_pipeline: int = 1

    def __post_init__(self) -> None:
        for field, name in PARAMETER.items():
            if self.degree(field) < 1:
                raise ConfigurationError(
                    f"{name} is {self.degree(field)}: a degree is at least 1; write 1 to switch it off"
                )
        if self.world_size > MOST_RANKS:
            raise ConfigurationError(f"a layout of {self.world_size:,} ranks: at most {MOST_RANKS:,} are planned")
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigurationError(
                "sequence_parallel shards the sequence over the ranks of a tensor-parallel group, and "
                "tensor_parallel_degree is 1; write sequence_parallel: false, or tensor_parallel_degree: 2 or more"
            )
        if self.virtual_pipeline > 1 and self.pipeline < SMALLEST_INTERLEAVED_PIPELINE:
            raise ConfigurationError(
                f"virtual_pp_degree {self.virtual_pipeline} needs pipeline_parallel_degree "
                f"{SMALLEST_INTERLEAVED_PIPELINE} or more (fleet interleaves more than two stages only), and it is "
                f"{self.pipeline}; write virtual_pp_degree: 1, or a larger pipeline_parallel_degree"
            )

    @classmethod
    def from_degrees(
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        sharding: int = 1,
        expert_axis: ExpertAxis | None = None,
        sequence_parallel: bool = False,
        virtual_pipeline: int = 1,
    ) -> Topology:
        """Build the topology of `world_size` ranks; the data-parallel degree is what the other degrees leave.

        Raises:
            ConfigurationError: the product of the degrees does not divide the number of ranks, or they contradict
                each other.
        """
        return cls(
            tensor=tensor,
            pipeline=pipeline,
            sharding=sharding,
            expert_axis=expert_axis,
            sequence_parallel=sequence_parallel,
            virtual_pipeline=virtual_pipeline,
        ).on(world_size)

    def on(self, world_size: int) -> Topology:
        """Return the same degrees on this many ranks; the data-parallel degree is what the other degrees leave.

        Raises:
            ConfigurationError: the product of the degrees does not divide the number of ranks.
        """
        if world_size < 1:
            raise ConfigurationError(f"the number of ranks is {world_size}: at least one rank must run")
        if world_size > MOST_RANKS:
            raise ConfigurationError(f"the number of ranks is {world_size:,}: at most {MOST_RANKS:,} are planned")
        without_dp = replace(self, data=1)
        if world_size % without_dp.world_size:
            raise ConfigurationError(_does_not_divide(world_size, without_dp))
        return replace(without_dp, data=world_size // without_dp.world_size)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.data * self.pipeline * self.sharding * self.tensor

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks: ranks that differ in data or sharding read different samples."""
        return self.data * self.sharding

    @property
    def expert(self) -> int:
        """The number of ranks that shard the experts."""
        return 1 if self.expert_axis is None else self.degree(self.expert_axis)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the index of a rank on each axis. Raises ConfigurationError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank {rank} does not exist: the layout has ranks 0 to {self.world_size - 1}")
        coords = {}
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self.degree(axis))
        return Coordinates(**coords)

    def rank(self, coords: Coordinates) -> int:
        """Return the rank at some coordinates; the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + getattr(coords, axis)
        return rank

    def dp_rank_of(self, rank: int) -> int:
        """Return a rank's index among the data-parallel ranks, 0 to `dp_world_size` - 1."""
        coords = self.coordinates(rank)
        return coords.data * self.sharding + coords.sharding

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Return the groups of ranks that differ in the given axes only: a partition of all ranks, each group
        ascending.

        `groups("tensor")` are the tensor-parallel groups, `groups("data", "sharding")` those that share a batch.
        """
        fixed = [axis for axis in AXES if axis not in axes]
        varied = [axis for axis in AXES if axis in axes]
        return [
            [
                self.rank(Coordinates(**dict(zip(fixed, outer, strict=True)), **dict(zip(varied, inner, strict=True))))
                for inner in product(*(range(self.degree(axis)) for axis in varied))
            ]
            for outer in product(*(range(self.degree(axis)) for axis in fixed))
        ]

    def group_of(self, rank: int, *axes: Axis) -> list[int]:
        """Return the group of `groups(*axes)` that contains a rank."""
        self.coordinates(rank)  # raises for an unknown rank
        return next(group for group in self.groups(*axes) if rank in group)

    def table(self) -> str:
        """Return a table with a line for each rank that says what it holds; axes of degree 1 are left out."""
        columns: list[tuple[str, list[str]]] = [("rank", [str(rank) for rank in range(self.world_size)])]
        all_coords = [self.coordinates(rank) for rank in range(self.world_size)]
        if self.dp_world_size > 1:
            parts = [f"dp rank {self.dp_rank_of(rank)} of {self.dp_world_size}" for rank in range(self.world_size)]
            columns.append(("batch", parts))
        if self.pipeline > 1:
            columns.append(("layers", [self._layers(coords.pipeline) for coords in all_coords]))
        if self.tensor > 1:
            columns.append(("matrices", [f"shard {coords.tensor} of {self.tensor}" for coords in all_coords]))
        if self.sharding > 1:
            columns.append(("optimizer", [f"shard {coords.sharding} of {self.sharding}" for coords in all_coords]))
        if self.expert_axis is not None and self.expert > 1:
            axis = self.expert_axis
            columns.append(("experts", [f"shard {getattr(coords, axis)} of {self.expert}" for coords in all_coords]))
        if len(columns) == 1:
            columns.append(("holds", ["everything"] * self.world_size))
        widths = [max(len(title), *map(len, cells)) for title, cells in columns]
        rows = [[title for title, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _layers(self, pp_stage: int) -> str:
        chunks = " + ".join(str(pp_stage + chunk * self.pipeline) for chunk in range(self.virtual_pipeline))
        total = self.pipeline * self.virtual_pipeline
        return f"chunk {chunks} of {total}" if self.virtual_pipeline > 1 else f"stage {pp_stage} of {total}"


def _does_not_divide(world_size: int, without_dp: Topology) -> str:
    """Return the error for a product of degrees that does not divide the number of ranks: factors, product, remedy."""
    factors = " x ".join(f"{PARAMETER[axis]} {without_dp.degree(axis)}" for axis in ("pipeline", "sharding", "tensor"))
    lines = [
        f"{world_size} ranks cannot be divided by the layout: {factors} = {without_dp.world_size}, "
        f"and {world_size} is not a multiple of {without_dp.world_size}",
    ]
    below = world_size // without_dp.world_size * without_dp.world_size
    counts = " or ".join(str(count) for count in (below, below + without_dp.world_size) if count)
    lines.append(f"  either start {counts} ranks")
    for axis in ("tensor", "pipeline", "sharding"):
        rest = without_dp.world_size // without_dp.degree(axis)
        fitting = [degree for degree in range(1, without_dp.degree(axis)) if world_size % (rest * degree) == 0]
        if fitting:
            lines.append(f"  or write {PARAMETER[axis]}: {max(fitting)}   (data parallelism takes the rest)")
    return "\n".join(lines)


# The topology of a run's parameters.

EXPERT_AXES: dict[str, ExpertAxis | None] = {"dummy": None, "mp": "tensor", "data": "data"}  # by moe_group
DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree", "virtual_pp_degree")


def topology_from(config: Config, world_size: int | None = None) -> Topology:
    """Return the layout that a configuration asks for on `world_size` ranks; data parallelism takes what the degrees
    leave.

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
                f"sharding_parallel_degree is {section.sharding_parallel_degree}, and sharding does not say what these "
                "ranks shard\n  write sharding: stage1 (optimizer states), stage2 (also gradients) or "
                "stage3 (also parameters); or sharding_parallel_degree: 1 for plain data parallelism"
            )
        whole_model = section.tensor_parallel_degree * section.pipeline_parallel_degree
        sharding = section.sharding_parallel_degree
        if sharding == ALL_RANKS:
            sharding = max(1, (world_size or 1) // whole_model) if section.sharding != "none" else 1
        least = Topology(
            tensor=section.tensor_parallel_degree,
            pipeline=section.pipeline_parallel_degree,
            sharding=sharding,
            expert_axis=EXPERT_AXES[section.moe_group],
            sequence_parallel=section.sequence_parallel,
            virtual_pipeline=section.virtual_pp_degree if section.pipeline_parallel_degree > 1 else 1,
        )
        return least if world_size is None else least.on(world_size)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}{_origins(config)}") from None


def _origins(config: Config) -> str:
    """Return a last line that says where the degrees were written; "" if nowhere."""
    names = [name for name in DEGREES if config.is_set(name)]
    written = ", ".join(f"{name} {config[name]} ({config.origin(name)})" for name in names)
    return f"\n  written: {written}" if written else ""
