"""From parameters to a topology."""

from __future__ import annotations

import pytest

from erniekit.config import Config
from erniekit.distributed.topology import Topology, topology_from
from erniekit.errors import ConfigurationError

NEEDED = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t"}


def _topology(world_size: int | None = None, **values: object) -> Topology:
    return topology_from(Config.from_mapping(NEEDED | values), world_size)


def test_one_process_has_no_layout() -> None:
    assert _topology() == _topology(1) == Topology()


def test_degrees_and_options_have_their_place() -> None:
    values = {
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 4,
        "virtual_pp_degree": 3,
        "sharding": "stage1",
        "sharding_parallel_degree": 5,
        "moe_group": "mp",
        "gradient_accumulation_steps": 8,
    }
    expected = Topology(
        tensor=2, pipeline=4, virtual_pipeline=3, sharding=5, expert_axis="tensor", sequence_parallel=True
    )
    assert _topology(**values) == expected
    assert _topology(80, **values).data == 2
    assert _topology(**values, sequence_parallel=False).sequence_parallel is False
    assert _topology(4, moe_group="dp") == Topology(data=4, expert_axis="data")


def test_virtual_stages_need_stages() -> None:
    assert _topology(2, virtual_pp_degree=2) == Topology(data=2)  # which parameters report as without effect


@pytest.mark.parametrize(
    ("world_size", "values", "words"),
    [
        (4, {"sharding_parallel_degree": 2}, "sharding_parallel_degree is 2, and sharding does not say what"),
        (6, {"tensor_parallel_degree": 4}, "6 ranks cannot be divided"),
        (0, {}, "the number of ranks is 0"),
        (None, {"pipeline_parallel_degree": 2, "virtual_pp_degree": 2}, "needs pipeline_parallel_degree 3 or more"),
    ],
)
def test_what_contradicts_itself_is_refused(world_size: int | None, values: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        _topology(world_size, **values)
    last = str(raised.value).splitlines()[-1]
    assert last.startswith("  written: ") == bool(values)
    assert all(f"{name} {value} (given values)" in last for name, value in values.items())


@pytest.mark.parametrize("axis", ["tensor_parallel_degree", "pipeline_parallel_degree"])
def test_sharding_without_a_degree_takes_the_ranks_that_the_model_leaves(axis: str) -> None:
    assert _topology(8, sharding="stage1").sharding == 8
    assert _topology(8, sharding="stage1", **{axis: 2}).sharding == 4
