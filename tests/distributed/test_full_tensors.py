"""What ranks hold in parts comes to the first one whole, in its own type."""

from __future__ import annotations

import pytest

from tests.distributed.cases import full_tensors

from .ranks import run_ranks


@pytest.mark.distributed
def test_tensors_travel_in_their_own_type() -> None:
    found, nothing = run_ranks(full_tensors.gather, 2)
    assert nothing == {}
    assert found == {
        "model.layers.0.mlp.up_proj.weight": [["BF16", [2, 6]], "float32", [[0.5] * 3 + [1.5] * 3] * 2],
        "model.layers.0.mlp.down_proj.weight": [["I8", [4, 3]], "int8", [[1] * 3] * 2 + [[2] * 3] * 2],
        "model.norm.weight": [["F64", [4]], "float64", [1e-300] * 4],
        "model.layers.1.mlp.experts.1.up_proj.weight": [["I64", [3]], "int64", [7] * 3],
    }
