"""Handing arrays from the first rank of a group to the others: two broadcasts, whatever the number of arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

ALIGNMENT = 8  # bytes; arrays made from what arrives begin at a multiple of it


def broadcast_arrays(metadata: Any, arrays: Sequence[np.ndarray], group: Any) -> tuple[Any, list[np.ndarray]]:
    """What the first rank of `group` has given, on every rank of it; what the others give counts for nothing.

    Args:
        metadata: JSON.
        group: paddle's; None: this rank is alone.
    """
    if group is None:
        return metadata, list(arrays)
    is_source = group.rank == 0
    data = _to_bytes(metadata, arrays) if is_source else b""
    size = paddle.to_tensor([len(data)])
    dist.broadcast(size, src=group.ranks[0], group=group)
    buffer = paddle.to_tensor(np.frombuffer(data, np.uint8)) if is_source else paddle.empty([int(size)], "uint8")
    dist.broadcast(buffer, src=group.ranks[0], group=group)
    return (metadata, list(arrays)) if is_source else _from_bytes(buffer.numpy())


def _to_bytes(metadata: Any, arrays: Sequence[np.ndarray]) -> bytes:
    header = json.dumps([metadata, [[array.dtype.str, array.shape] for array in arrays]]).encode()
    blocks = [len(header).to_bytes(ALIGNMENT, "little"), header, *(array.tobytes() for array in arrays)]
    return b"".join(block + b"\0" * (-len(block) % ALIGNMENT) for block in blocks)


def _from_bytes(data: np.ndarray) -> tuple[Any, list[np.ndarray]]:
    start = ALIGNMENT

    def take(size: int) -> np.ndarray:
        nonlocal start
        first = start
        start += size + -size % ALIGNMENT
        return data[first : first + size]

    metadata, array_specs = json.loads(take(int.from_bytes(data[:ALIGNMENT].tobytes(), "little")).tobytes())
    arrays = []
    for dtype, shape in array_specs:
        kind = np.dtype(dtype)
        arrays.append(take(kind.itemsize * int(np.prod(shape))).view(kind).reshape(shape))
    return metadata, arrays
