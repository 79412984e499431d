"""Attention sinks (Xiao et al., 2023, arXiv:2309.17453; learnt, as in GPT-OSS) as one more key, for every kernel."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

SINK_CHANNELS = 8  # kernels want sizes of heads that are multiples of it


def with_sink_key(
    q_BSHD: paddle.Tensor, k_BSKD: paddle.Tensor, v_BSKD: paddle.Tensor, sinks_H: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return queries, keys and values [B, S + 1, ..., D + 8] in which attention has a sink (`Architecture`).

    A sink takes a share of a query's probabilities, as a key with value 0 does whose score is the head's. Such a key
    stands before the others. It alone has 1 in a channel in which queries hold the scores of their heads.
    """
    batch, length, heads, size = q_BSHD.shape
    width = size + SINK_CHANNELS

    def widened(x: paddle.Tensor) -> paddle.Tensor:
        return F.pad(x, [0, 0, 1, 0, 0, 0, 0, SINK_CHANNELS], pad_from_left_axis=True)

    channel = paddle.zeros([width], q_BSHD.dtype)
    channel[size] = 1.0
    scores_HD = sinks_H.astype(q_BSHD.dtype).unsqueeze(1) * (channel * width**0.5)
    q = widened(q_BSHD * (width / size) ** 0.5) + scores_HD.expand([batch, length + 1, heads, width])
    sink_key = channel.expand([batch, 1, k_BSKD.shape[2], width])
    k = paddle.concat([sink_key, widened(k_BSKD)[:, 1:]], axis=1)
    return q, k, widened(v_BSKD)
