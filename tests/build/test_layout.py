"""Where a layout cuts the layers of a model, from a configuration, without any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from erniekit.build.layout import partition_layers
from erniekit.config import Config
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig


@pytest.mark.proves("pp_seg_method")
@pytest.mark.parametrize(
    ("method", "layers"),
    [
        ("layer:DecoderLayer", [range(2), range(2, 4), range(4, 6)]),
        ("uniform", [range(2), range(2, 5), range(5, 6)]),  # embedding, norm and head count, too
        ([0, 1, 3], [range(0), range(2), range(2, 6)]),
    ],
)
def test_layers_are_divided_as_asked(
    method: Any, layers: list[range], make_config: Callable[..., Config], tiny_model: Any
) -> None:
    config = make_config(pipeline_parallel_degree=3, pp_seg_method=method)
    model = replace(ModelConfig.from_folder(tiny_model), num_hidden_layers=6)
    parts = partition_layers(config, model, Topology(pipeline=3))
    assert [list(part) for part in parts] == [list(part) for part in layers]
