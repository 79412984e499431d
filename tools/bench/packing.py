"""How fast and how tightly samples are packed: python tools/bench/packing.py

A million log-normal lengths (median 400 tokens), cut off at the row length, on one core. Beside our packer stand the
textbook's best fit decreasing and upstream ERNIEKit's policy: samples in the order they come, each into the emptiest
open row of its buffer of 500. Fullness is tokens / (rows x row length).
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import math
import platform
import time
from collections.abc import Callable

import numpy as np

from erniekit.data.packing import pack_greedy, pack_sequential

CAPACITIES = (4096, 8192, 32768)


def worst_fit(lengths: np.ndarray, capacity: int) -> int:
    """The number of rows; a heap finds the emptiest one, so that the policy's speed is not the implementation's."""
    rooms: list[int] = []  # negated: heapq has the smallest first
    for length in lengths.tolist():
        if rooms and -rooms[0] >= length:
            heapq.heapreplace(rooms, rooms[0] + length)
        else:
            heapq.heappush(rooms, length - capacity)
    return len(rooms)


def greedy(lengths: np.ndarray, capacity: int) -> int:
    return len(pack_greedy(lengths, capacity))


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> int:
    """The textbook algorithm: longest first, each into the fullest row that has room."""
    with_room: dict[int, int] = {}  # room -> rows that have it
    rooms: list[int] = []  # its keys, sorted
    rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        fullest = bisect.bisect_left(rooms, length)
        room = rooms[fullest] if fullest < len(rooms) else capacity
        if fullest == len(rooms):
            rows += 1
        elif with_room[room] == 1:
            del with_room[room], rooms[fullest]
        else:
            with_room[room] -= 1
        rest = room - length
        if rest and rest not in with_room:
            bisect.insort(rooms, rest)
        if rest:
            with_room[rest] = with_room.get(rest, 0) + 1
    return rows


def in_order(lengths: np.ndarray, capacity: int) -> int:
    return len(pack_sequential(lengths, capacity))


def measure(
    pack: Callable[[np.ndarray, int], int], lengths: np.ndarray, capacity: int, window: int
) -> tuple[float, float]:
    """(seconds, fullness) of packing all lengths, `window` samples at a time."""
    start = time.perf_counter()
    rows = sum(pack(lengths[first : first + window], capacity) for first in range(0, len(lengths), window))
    return time.perf_counter() - start, float(lengths.sum()) / (rows * capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--median", type=float, default=400.0, help="of the lengths, in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    options = parser.parse_args()
    drawn = np.random.default_rng(0).lognormal(math.log(options.median), options.sigma, options.samples)
    policies: list[tuple[str, Callable[[np.ndarray, int], int], int]] = [
        ("ours (greedy_intokens), window of 100,000", greedy, 100_000),
        ("ours, window of 10,000", greedy, 10_000),
        ("ours, window of 500", greedy, 500),
        ("best fit decreasing, window of 100,000", best_fit_decreasing, 100_000),
        ("in order (greedy_intokens: false)", in_order, options.samples),
        ("upstream: emptiest row, buffer of 500", worst_fit, 500),
    ]
    print(f"{options.samples:,} lengths, median {options.median:g}, sigma {options.sigma:g}; ", end="")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, one core\n")
    print("| row length | policy | seconds | samples/s | full |\n|---:|---|---:|---:|---:|")
    for capacity in CAPACITIES:
        lengths = np.clip(drawn, 1, capacity).astype(np.int64)
        for name, pack, window in policies:
            seconds, full = measure(pack, lengths, capacity, window)
            print(f"| {capacity:,} | {name} | {seconds:.2f} | {len(lengths) / seconds:,.0f} | {full:.2%} |", flush=True)


if __name__ == "__main__":
    main()
