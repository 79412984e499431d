"""What Paddle lacks so that fleet runs on CPU ranks. The only place that patches Paddle; never loaded on a GPU.

Written for PaddlePaddle 3.3.1. Each patch is a function whose docstring names its cause: `patches.py`, `sharding.py`.
"""

from __future__ import annotations

from collections import Counter

from erniekit.distributed.cpu_backend.patches import PATCHES, Connections, use_socket_process_groups

DEFAULT_TIMEOUT = 1800.0  # seconds, what NCCL's process groups are given, too

_applied = False


def apply(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Make `paddle.distributed` and fleet work on CPU ranks; before `fleet.init`, once (later calls change nothing).

    Args:
        timeout: seconds that a rank waits for another's message. A slower rank is no fault below it; above it the
            waiting ranks raise RankTimeoutError, which names it. When a rank has ended, those that wait for it raise
            RankLostError at once.
    """
    global _applied
    if _applied:
        return
    _applied = True
    use_socket_process_groups(timeout)
    for patch in PATCHES:
        patch()


def bytes_sent() -> Counter[int]:
    """The bytes that this rank has sent to others so far, by number of group (`Group.id`)."""
    return Counter(Connections.mailboxes.sent) if Connections.mailboxes else Counter()
