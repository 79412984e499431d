"""The layout section of `erniekit validate`: which rank holds which shard, and the memory of each. Needs no Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.build.layout import LayoutPlan, describe_formats, number_formats
from erniekit.distributed.stages import bubble_fraction, stage_layers
from erniekit.distributed.topology import AXES

if TYPE_CHECKING:
    from erniekit.config import Config
    from erniekit.distributed.topology import Topology

MAX_RANKS_LISTED = 16  # in larger layouts the ranks of one tensor-parallel group share a line
MAX_TABLE_ROWS = 24
UNITS = {"GB": 10**9, "MB": 10**6}


def layout_blocks(config: Config, topology: Topology, plan: LayoutPlan | None) -> list[str]:
    """Return the paragraphs that describe a layout of several ranks.

    Args:
        plan: None if the model's shape is unknown; then everything that depends on it is left out.
    """
    degrees = " x ".join(f"{axis} {topology.degree(axis)}" for axis in AXES if topology.degree(axis) > 1)
    lines = [f"layout of {topology.world_size} ranks: {degrees or 'one process'}"]
    lines += [f"  {line}" for line in _rank_table(topology)]
    if topology.expert_axis and topology.expert > 1:
        lines.append(f"  experts are sharded over {topology.expert} ranks ({topology.expert_axis})")
    if topology.pipeline > 1:
        accumulation = config.training.gradient_accumulation_steps
        equal = bubble_fraction(topology, accumulation)
        bubble, remark = (plan.bubble, f" ({equal:.0%} if all stages took equally long)") if plan else (equal, "")
        lines.append(
            f"  pipeline bubble: {bubble:.0%} of a step with gradient_accumulation_steps {accumulation}{remark}"
        )
    if plan is None:
        return ["\n".join(lines)]
    traffic = ", ".join(f"{axis} {size / UNITS['GB']:,.3g} GB" for axis, size in plan.max_traffic.items() if size)
    if traffic:
        lines.append(f"  the busiest rank sends in a step, computed: {traffic}")
    return ["\n".join(lines), memory_table(config, plan)]


def memory_table(config: Config, plan: LayoutPlan) -> str:
    """Return a table of the estimated memory per rank, one line per pipeline stage."""
    unit = "GB" if max(stage_memory["total"] for stage_memory in plan.memory) >= UNITS["GB"] else "MB"
    categories = [name for name in plan.memory[0] if any(stage_memory[name] for stage_memory in plan.memory)]
    rows = [["stage", "ranks", "layers", *(name.replace("_", " ") for name in categories)]]
    for number, memory in enumerate(plan.memory):
        layers = stage_layers(plan.model_chunks, number, plan.topology.pipeline)
        architecture = plan.model.architecture
        in_front = ["code tables" if architecture.codes is not None else "encoder"] if architecture.towers else []
        parts = in_front if number == 0 else []
        parts = [*parts, _ranges(layers)] if layers else parts
        sizes = [f"{memory[name] / UNITS[unit]:,.3g}" for name in categories]
        rows.append([str(number), _ranks_of(plan.topology, number), ", ".join(parts), *sizes])
    if plan.topology.pipeline == 1:
        rows = [row[1:] for row in rows]
    formats = describe_formats(number_formats(config))
    title = f"memory of each rank in {unit}, computed for full rows: {formats}"
    return "\n".join([title, *(f"  {line}" for line in _aligned(rows))])


def _rank_table(topology: Topology) -> list[str]:
    """Return the lines that say which rank holds which shard."""
    if topology.world_size <= MAX_RANKS_LISTED:
        return topology.table().splitlines()
    titles = {"data": "batch", "pipeline": "stage", "sharding": "shard", "tensor": "matrices"}
    degrees = {"data": topology.dp_world_size, **{axis: topology.degree(axis) for axis in AXES[1:]}}
    shown_axes = [axis for axis in AXES if degrees[axis] > 1]
    rows = [["ranks", *(titles[axis] for axis in shown_axes)]]
    if shown_axes == ["data"]:
        last = topology.world_size - 1
        return _aligned([*rows, [f"0-{last}", f"dp ranks 0-{last} of {topology.dp_world_size}, one each"]])
    groups = topology.world_size // topology.tensor
    for first in range(0, min(groups, MAX_TABLE_ROWS) * topology.tensor, topology.tensor):
        coords = topology.coordinates(first)
        cells = {axis: f"{getattr(coords, axis)} of {topology.degree(axis)}" for axis in shown_axes}
        cells |= {"data": f"dp rank {topology.dp_rank_of(first)} of {topology.dp_world_size}"}
        cells |= {"tensor": f"shards 0-{topology.tensor - 1}, one each"}
        rows.append([_range(first, first + topology.tensor - 1), *(cells[axis] for axis in shown_axes)])
    more, shown = groups - MAX_TABLE_ROWS, _aligned(rows)
    return [*shown, f"... and {more} more groups of ranks, numbered in the same way"] if more > 0 else shown


def _ranks_of(topology: Topology, pp_stage: int) -> str:
    """Return the ranks of a pipeline stage as `_ranges` does; of many ranges only those that are shown are made."""
    width = topology.sharding * topology.tensor  # neighbours, of each replica
    if topology.pipeline == 1:
        return _range(0, topology.world_size - 1)
    firsts = range(pp_stage * width, topology.world_size, topology.pipeline * width)
    shown = firsts if len(firsts) <= 3 else [*firsts[:2], firsts[-1]]
    return _listed([_range(first, first + width - 1) for first in shown], len(firsts))


def _ranges(numbers: list[int]) -> str:
    """Format [0, 1, 2, 8, 9] as "0-2, 8-9"; of many ranges, show the first two and the last."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return _listed([_range(first, last) for first, last in ranges], len(ranges))


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _listed(ranges: list[str], count: int) -> str:
    """Join all of `count` ranges, or the first two and the last one."""
    return ", ".join(ranges) if count <= 3 else f"{ranges[0]}, {ranges[1]}, ..., {ranges[-1]}"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
