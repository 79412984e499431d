"""Tensors of several types, whole and in slices, brought to the first rank."""

from __future__ import annotations

from typing import Any


def gather() -> dict[str, Any]:
    """Two ranks with slices of a matrix, and copies of the rest; types, shapes and sums on the rank that writes."""
    import paddle

    from erniekit.distributed.broadcast import GatheredTensors
    from erniekit.distributed.init import init_mesh
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.ernie4_5 import ERNIE4_5_MOE
    from erniekit.model.local_tensors import local_tensors

    mesh = init_mesh(Topology(tensor=2), timeout=60)
    rank = mesh.rank
    own = {
        "model.layers.0.mlp.up_proj.weight": paddle.full([2, 3], rank + 0.5).astype("bfloat16"),
        "model.layers.0.mlp.down_proj.weight": paddle.full([2, 3], rank + 1, dtype="int8"),
        "model.norm.weight": paddle.full([4], 1e-300, dtype="float64"),
    }
    if rank == 1:
        own["model.layers.1.mlp.experts.1.up_proj.weight"] = paddle.full([3], 7, dtype="int64")
    whole = GatheredTensors(mesh, local_tensors(own), ERNIE4_5_MOE)
    found = {}
    for name in whole.names:
        values = whole.read(name)
        assert (values is None) == (rank != 0)
        if values is not None:
            found[name] = [list(whole.stored(name)), str(values.dtype), values.tolist()]
    return found
