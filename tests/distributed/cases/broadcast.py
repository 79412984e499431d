"""Ranks of a group that are handed what its first rank has."""

from __future__ import annotations

import numpy as np
import paddle.distributed as dist

from erniekit.distributed import cpu_backend
from erniekit.distributed.broadcast import broadcast_arrays


def example_arrays(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [
        generator.integers(-9, 9, (3, 5)),
        generator.standard_normal((2, 1, 7)).astype(np.float32),
        np.empty((0, 4), np.int32),
        np.array([True, False, True]),
        generator.standard_normal((4, 6))[:, ::2],  # not contiguous
        np.float64(2.5).reshape(()),
    ]


def broadcast_in_two_groups() -> list:
    """Ranks 0 and 1, and 2 and 3, at once; the second group begins with rank 3's own arrays of another seed."""
    cpu_backend.apply()
    dist.init_parallel_env()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, seed = (groups[0], 5) if dist.get_rank() < 2 else (groups[1], 6)
    received = []
    for turn in range(3):
        own = example_arrays(seed + turn) if group.rank == 0 else []
        metadata, arrays = broadcast_arrays({"turn": turn, "of": dist.get_rank()}, own, group)
        assert metadata == {"turn": turn, "of": group.ranks[0]}
        for array, expected in zip(arrays, example_arrays(seed + turn), strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)
        received.append(len(arrays))
    metadata, arrays = broadcast_arrays(None, [], group)
    assert metadata is None and arrays == []
    return received
