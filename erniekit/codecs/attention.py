"""Attention over the frames of one recording, a block of queries at a time, and the activations of transformers.

Shapes: T frames, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F

ACTIVATIONS: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate=True),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
_BLOCK = 1 << 24  # scores of all heads that are in memory at once


def attend(
    q_TND: paddle.Tensor, k_TND: paddle.Tensor, v_TND: paddle.Tensor, *, window: int | None = None
) -> paddle.Tensor:
    """Return softmax(q k' / sqrt(D)) v as [T, N D].

    Args:
        window: a frame attends to itself and to the frames before it, `window` in all. None: to all frames. Keys may
            have fewer heads than queries: each then serves as many heads of queries in a row.
    """
    T, N, D = q_TND.shape
    repeats = N // k_TND.shape[1]
    q_NTD, k_NTD, v_NTD = (x.transpose([1, 0, 2]) for x in (q_TND * D**-0.5, k_TND, v_TND))
    if repeats > 1:
        k_NTD, v_NTD = (x.repeat_interleave(repeats, 0) for x in (k_NTD, v_NTD))
    rows = max(1, _BLOCK // (N * (T if window is None else min(T, 2 * window))))
    if window is not None:
        rows = min(rows, window)  # so that a block sees at most two windows of keys
    blocks = []
    for start in range(0, T, rows):
        stop = min(start + rows, T)
        first, last = (0, T) if window is None else (max(0, start - window + 1), stop)
        scores = paddle.matmul(q_NTD[:, start:stop], k_NTD[:, first:last], transpose_y=True)
        if window is not None:
            behind = paddle.arange(start, stop).unsqueeze(1) - paddle.arange(first, last).unsqueeze(0)
            scores = paddle.where((behind >= 0) & (behind < window), scores, paddle.full([], float("-inf")))
        blocks.append(paddle.matmul(F.softmax(scores, -1), v_NTD[:, first:last]))
    return paddle.concat(blocks, 1).transpose([1, 0, 2]).reshape([T, N * D])
