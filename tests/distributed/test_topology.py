"""The topology against its own definition, and against fleet's numbering of ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.distributed.topology import AXES, Topology
from erniekit.errors import ConfigurationError

AXIS_SETS = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]
FLEET = {"data": "data", "pipeline": "pipe", "sharding": "sharding", "tensor": "model"}
degrees = st.integers(1, 4)
topologies = st.builds(Topology, tensor=degrees, pipeline=degrees, sharding=degrees, data=degrees)
quick = settings(max_examples=40, deadline=None, derandomize=True)


@quick
@given(topologies, st.sampled_from(AXIS_SETS))
def test_groups_of_every_kind_partition_the_ranks(topology: Topology, axes: tuple) -> None:
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert group == sorted(group)
        for rank in group:
            assert topology.group_of(rank, *axes) == group
            same = [axis for axis in AXES if axis not in axes]
            first, own = topology.coordinates(group[0]), topology.coordinates(rank)
            assert all(getattr(first, axis) == getattr(own, axis) for axis in same)
    sizes = {len(group) for group in groups}
    expected = 1
    for axis in axes:
        expected *= topology.degree(axis)
    assert sizes == {expected}


@quick
@given(topologies)
def test_coordinates_and_ranks_are_inverse(topology: Topology) -> None:
    all_coords = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert [topology.rank(coords) for coords in all_coords] == list(range(topology.world_size))
    assert len(set(all_coords)) == topology.world_size
    dp_world_size = [topology.dp_rank_of(rank) for rank in range(topology.world_size)]
    assert set(dp_world_size) == set(range(topology.dp_world_size))
    for group in topology.groups("pipeline", "tensor"):
        assert len({dp_world_size[rank] for rank in group}) == 1  # one replica of the model reads one part


@quick
@given(topologies, st.sampled_from(AXES))
def test_ranks_are_numbered_as_fleet_numbers_them(topology: Topology, axis: str) -> None:
    from paddle.distributed.fleet.base.topology import CommunicateTopology

    names = ["data", "pipe", "sharding", "sep", "model"]  # the default of fleet's hybrid_parallel_order
    dims = [topology.data, topology.pipeline, topology.sharding, 1, topology.tensor]
    fleet = CommunicateTopology(names, dims)
    assert sorted(fleet.get_comm_list(FLEET[axis])) == sorted(topology.groups(axis))
    for rank in range(topology.world_size):
        coords = topology.coordinates(rank)
        assert tuple(fleet.get_coord(rank)) == (coords.data, coords.pipeline, coords.sharding, 0, coords.tensor)
    fused = [sorted(group) for group in fleet.get_fused_ranks(["data", "sharding"])]
    assert sorted(fused) == sorted(topology.groups("data", "sharding"))


@quick
@given(st.integers(1, 64), degrees, degrees, degrees)
def test_the_data_degree_is_the_rest_or_the_layout_is_refused(
    world_size: int, tensor: int, pipeline: int, sharding: int
) -> None:
    product = tensor * pipeline * sharding
    if world_size % product == 0:
        topology = Topology.from_degrees(world_size, tensor=tensor, pipeline=pipeline, sharding=sharding)
        assert topology.data * product == world_size == topology.world_size
        return
    with pytest.raises(ConfigurationError) as raised:
        Topology.from_degrees(world_size, tensor=tensor, pipeline=pipeline, sharding=sharding)
    text = str(raised.value)
    for part in (
        f"{world_size} ranks",
        f"tensor_parallel_degree {tensor}",
        f"pipeline_parallel_degree {pipeline}",
        f"sharding_parallel_degree {sharding}",
        f"= {product}",
    ):
        assert part in text


def test_what_the_error_advises_works() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Topology.from_degrees(12, tensor=8, pipeline=3)
    assert str(raised.value).splitlines() == [
        "12 ranks cannot be divided by the layout: pipeline_parallel_degree 3 x sharding_parallel_degree 1 x "
        "tensor_parallel_degree 8 = 24, and 12 is not a multiple of 24",
        "  either start 24 ranks",
        "  or write tensor_parallel_degree: 4   (data parallelism takes the rest)",
    ]
    assert Topology.from_degrees(24, tensor=8, pipeline=3).data == 1
    assert Topology.from_degrees(12, tensor=4, pipeline=3).data == 1


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tensor": 0}, "tensor_parallel_degree is 0"),
        ({"virtual_pipeline": 0}, "virtual_pp_degree is 0"),
        ({"data": -1}, "the data-parallel degree is -1"),
        ({"sequence_parallel": True}, "write sequence_parallel: false"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "pipeline_parallel_degree 3 or more"),
    ],
)
def test_degrees_that_contradict_each_other_are_refused(degrees: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Topology(**degrees)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank {rank} .* ranks 0 to 3"):
        Topology(tensor=4).group_of(rank, "tensor")


def test_the_expert_degree_is_that_of_the_axis_it_follows() -> None:
    assert Topology(tensor=2, data=4).expert == 1
    assert Topology(tensor=2, data=4, expert_axis="tensor").expert == 2
    assert Topology(tensor=2, data=4, expert_axis="data").expert == 4


def test_the_table_says_what_each_rank_holds() -> None:
    topology = Topology.from_degrees(8, tensor=2, pipeline=2, expert_axis="tensor")
    assert topology.table().splitlines()[:4] == [
        "rank  batch           layers        matrices      experts",
        "0     dp rank 0 of 2  stage 0 of 2  shard 0 of 2  shard 0 of 2",
        "1     dp rank 0 of 2  stage 0 of 2  shard 1 of 2  shard 1 of 2",
        "2     dp rank 0 of 2  stage 1 of 2  shard 0 of 2  shard 0 of 2",
    ]
    assert len(topology.table().splitlines()) == 9
    interleaved = Topology(pipeline=4, virtual_pipeline=2, sharding=2).table().splitlines()
    assert interleaved[3] == "2     dp rank 0 of 2  chunk 1 + 5 of 8  shard 0 of 2"
    assert Topology().table().splitlines() == ["rank  holds", "0     everything"]
