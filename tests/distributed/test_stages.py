"""Cutting the stack of layers, beside fleet's own way of cutting it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.distributed.stages import layer_chunks, numel_on_rank, shapes_on_pp_stage, stage_layers
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError
from erniekit.model.vocabulary import grow, grown_vocabulary, new_row_shapes
from tests.model.tiny import tiny_config

ASKED = "layer:MyDecoderLayer"  # not a default, so it never means `uniform`
quick = settings(max_examples=60, deadline=None, derandomize=True)


def _bounds_of_fleet(layers: int, topology: Topology, method: str | tuple[int, ...], tail: int) -> list[int]:
    from paddle.distributed.fleet.meta_parallel import LayerDesc
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SegmentLayers
    from paddle.nn import Layer

    decoder, other = type("DecoderLayer", (Layer,), {}), type("Other", (Layer,), {})
    stack = [LayerDesc(kind) for kind in [other, *[decoder] * (layers + tail), other, other]]
    virtual = topology.virtual_pipeline if topology.virtual_pipeline > 1 else None
    method = list(method) if isinstance(method, tuple) else method
    return SegmentLayers(stack, topology.pipeline, method, virtual).do_segment()


def _runs_of_fleet(layers: int, topology: Topology, method: str | tuple[int, ...], tail: int) -> list[list[int]]:
    """The layers between the bounds; item 0 is the embedding, and items after the layers are none."""
    bounds = _bounds_of_fleet(layers, topology, method, tail)
    return [[item - 1 for item in range(*pair) if 1 <= item <= layers] for pair in pairwise(bounds)]


@quick
@given(
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["uniform", "layer:DecoderLayer"]),
)
def test_every_layer_is_in_one_run_as_fleet_cuts_them(
    layers: int, tail: int, pipeline: int, virtual: int, method: str
) -> None:
    virtual = virtual if pipeline > 2 and method != "uniform" else 1
    topology = Topology(pipeline=pipeline, virtual_pipeline=virtual)
    parts = pipeline * virtual
    if method != "uniform" and virtual == 1 and (layers + tail) % parts:
        method = "uniform"  # the default where layers cannot be divided equally, as in the original
    fits = (layers + tail) % parts == 0 if method != "uniform" else layers + tail + 3 >= 2 * parts
    if not fits and parts > 1:
        with pytest.raises(ConfigurationError):
            layer_chunks(layers, topology, method=method, tail=tail)
        return
    chunks = layer_chunks(layers, topology, method=method, tail=tail)
    assert [layer for chunk in chunks for layer in chunk] == list(range(layers))
    assert [list(chunk) for chunk in chunks] == _runs_of_fleet(layers, topology, method, tail)
    stages = [stage_layers(chunks, stage, pipeline) for stage in range(pipeline)]
    assert sorted(layer for stage in stages for layer in stage) == list(range(layers))


@pytest.mark.parametrize("method", [(0, 29), (0, 29, 57)])
def test_a_list_names_the_first_item_of_each_stage(method: tuple[int, ...]) -> None:
    topology = Topology(pipeline=2)
    chunks = layer_chunks(54, topology, method=method)
    assert [len(chunk) for chunk in chunks] == [28, 26]  # beside the embedding; beside norm and head
    assert [list(chunk) for chunk in chunks] == _runs_of_fleet(54, topology, method, 0)


def test_interleaved_runs_go_round_the_stages() -> None:
    chunks = layer_chunks(16, Topology(pipeline=4, virtual_pipeline=2))
    assert stage_layers(chunks, 1, 4) == [2, 3, 10, 11]


def test_interleaved_runs_are_cut_in_every_way() -> None:
    topology = Topology(pipeline=3, virtual_pipeline=2)
    assert [len(chunk) for chunk in layer_chunks(9, topology, method="uniform")] == [1, 2, 2, 2, 2, 0]
    assert [len(chunk) for chunk in layer_chunks(9, topology, method=(0, 3, 4, 5, 7, 9))] == [2, 1, 1, 2, 2, 1]


def test_names_of_classes_may_have_prefixes() -> None:
    topology = Topology(pipeline=2)
    expected = layer_chunks(4, topology)
    assert layer_chunks(4, topology, method="layer:Ernie4_5_DecoderLayer|EmptyLayer") == expected


@pytest.mark.parametrize(
    ("layers", "topology", "how", "words"),
    [
        (
            54,
            Topology(pipeline=4),
            {"method": ASKED},
            "54 layers cannot be divided equally: pipeline_parallel_degree 4 = 4 model chunks",
        ),
        (54, Topology(pipeline=4), {"method": ASKED}, "add_tail_layers: 2"),
        (54, Topology(pipeline=4), {"method": ASKED}, "pipeline_parallel_degree: 1, 2, 3, 6, 9, 18, 27, 54"),
        (54, Topology(pipeline=4), {"method": ASKED}, "or pp_seg_method: uniform"),
        (7, Topology(pipeline=3, virtual_pipeline=2), {"tail": 1}, "7 layers and 1 empty ones .*virtual_pp_degree 2"),
        (4, Topology(pipeline=2), {"method": "layer:Linear"}, "there is no such layer"),
        (54, Topology(pipeline=2), {"method": (0, 29, 55)}, "The list ends at 57"),
        (54, Topology(pipeline=2), {"method": (0, 56)}, "norm and head stay together"),
        (1, Topology(pipeline=4), {"method": "uniform"}, "4 items are too few for 4 stages"),
    ],
)
def test_stacks_that_cannot_be_cut_so_are_refused(layers: int, topology: Topology, how: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        layer_chunks(layers, topology, **how)


def test_layers_that_cannot_be_divided_equally_are_cut_uniformly_by_default() -> None:
    """The pipelines of the published files for 300B: 54 layers over 12, 14 and 10 stages."""
    for stages in (12, 14, 10):
        for method in ("layer:DecoderLayer", "layer:Ernie4_5_DecoderLayer|EmptyLayer"):
            chunks = layer_chunks(54, Topology(pipeline=stages), method=method)
            assert chunks == layer_chunks(54, Topology(pipeline=stages), method="uniform")
            assert sum(map(len, chunks)) == 54


def test_what_the_error_advises_works() -> None:
    for tail, pipeline in ((2, 4), (0, 27)):
        assert sum(map(len, layer_chunks(54, Topology(pipeline=pipeline), tail=tail))) == 54
    with pytest.raises(ConfigurationError) as raised:
        layer_chunks(3, Topology(pipeline=5), method=ASKED)  # two empty layers would be two stages without any
    assert "add_tail_layers" not in str(raised.value)


def test_the_advice_of_the_interleaving_error_is_itself_accepted() -> None:
    """Two interleaved stages are: neither they nor one belong to the advice, which need not have several parts."""
    with pytest.raises(ConfigurationError) as raised:
        layer_chunks(4, Topology(pipeline=4, virtual_pipeline=2))
    assert str(raised.value).splitlines()[1:] == [
        "  write virtual_pp_degree: 1",
        "  or pp_seg_method: uniform",
        "  or a list of the first item of each chunk as pp_seg_method",
    ]
    with pytest.raises(ConfigurationError, match="write add_tail_layers: 2\n  or pipeline_parallel_degree: 11\n"):
        layer_chunks(22, Topology(pipeline=4, virtual_pipeline=2))


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_lie_where_their_weight_does_and_are_not_divided(tied: bool) -> None:
    """Those of tied embeddings on the first and on the last stage; every tensor-parallel rank has all of them."""
    config = tiny_config(tie_word_embeddings=tied)
    grown = grow(config, grown_vocabulary(config, 53, 10))
    topology = Topology(pipeline=2, tensor=2)
    chunks = layer_chunks(2, topology)
    first, last = (shapes_on_pp_stage(new_row_shapes(grown), grown, topology, chunks, stage) for stage in (0, 1))
    assert list(first) == ["model.embed_tokens.new_rows"]
    assert list(last) == (["model.embed_tokens.new_rows"] if tied else ["lm_head.new_rows"])
    assert numel_on_rank(first, grown.architecture, topology) == 10 * 16
