"""What Paddle lacks to run fleet on CPU ranks. The only place that patches Paddle; never loaded on a GPU.

Written for PaddlePaddle 3.3.1. Each patch is a function whose docstring names its cause: `patches.py`, `sharding.py`.
"""

from __future__ import annotations

from collections import Counter

from erniekit.distributed.cpu_backend.patches import PATCHES, Connections, use_socket_process_groups

DEFAULT_TIMEOUT = 1800.0  # seconds, also Paddle's default for NCCL groups

_applied = False


def apply(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Make `paddle.distributed` and fleet work on CPU ranks. Call it before `fleet.init`; later calls change nothing.

    Args:
        timeout: seconds that a rank waits for another's message. Within it, a slow rank is no error; beyond it the
            waiting ranks raise RankTimeoutError, which names the rank. When a rank has ended, ranks that wait for it
            raise RankLostError at once.
    """
    global _applied
    if _applied:
        return
    _applied = True
    use_socket_process_groups(timeout)
    for patch in PATCHES:
        patch()


def bytes_sent() -> Counter[int]:
    """Return the bytes that this rank has sent so far, by group (`Group.id`)."""
    return Counter(Connections.mailboxes.sent) if Connections.mailboxes else Counter()
