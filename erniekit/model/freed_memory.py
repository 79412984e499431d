"""Tune how the C library treats freed memory, which on a CPU holds the tensors. It needs no Paddle."""

from __future__ import annotations

import ctypes
import platform

# glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEPT_FREE_BYTES = 2**31 - 1  # the largest value mallopt takes
_GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Make the process keep freed memory for its next tensors; return whether the C library supports it (glibc).

    By default glibc asks the kernel for every block above 32 MB and returns it when it is freed, and the kernel clears
    each page again. Training frees and allocates the same large blocks at every step: with ERNIE-4.5-0.3B's shapes this
    takes 15 to 30% of the step. Peak memory grows by a tenth to a fifth, through gaps between blocks. All threads
    (`threads.py`) share one arena, because memory kept free in one arena is not available to the others.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)
