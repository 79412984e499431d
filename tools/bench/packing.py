"""How fast and how tightly samples are packed, and in how much memory: python tools/bench/packing.py [--write]

A million and ten million log-normal lengths (median 400 tokens), cut off at the row length, on one core; every figure
is the median of some rounds in which the policies take turns, each in a process of its own. Beside our packer stand the
textbook's best fit decreasing and upstream ERNIEKit's policy: samples in the order they come, each into the emptiest
open row of its buffer of 500. Fullness is tokens / (rows x row length). Peak memory is what packing adds to a process
that holds the lengths; ours then also holds the packs of all windows, as training does, the others count rows.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from marked import BENCHMARKS, ROOT, measured_at, with_table
from rounds import counted

sys.path.insert(0, str(ROOT))
from erniekit.data.packing import Packs, concatenate_packs, pack_greedy, pack_sequential

MEDIAN, SIGMA = 400, 1.0  # of the lengths, in tokens; of their logarithm


class Case(NamedTuple):
    samples: int
    capacity: int
    policy: str


def worst_fit(lengths: np.ndarray, capacity: int) -> int:
    """The number of rows; a heap finds the emptiest one, so that the policy's speed is not the implementation's."""
    rooms: list[int] = []  # negated: heapq has the smallest first
    for length in lengths.tolist():
        if rooms and -rooms[0] >= length:
            heapq.heapreplace(rooms, rooms[0] + length)
        else:
            heapq.heappush(rooms, length - capacity)
    return len(rooms)


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


POLICIES: dict[
    str, tuple[Callable[[np.ndarray, int], Packs | int], int]
] = {  # rows or their number; the window, 0: all
    "ours (`greedy_intokens`), window of 100,000": (pack_greedy, 100_000),
    "ours, window of 10,000": (pack_greedy, 10_000),
    "ours, window of 500": (pack_greedy, 500),
    "best fit decreasing, window of 100,000": (best_fit_decreasing, 100_000),
    "in order (`greedy_intokens: false`)": (pack_sequential, 0),
    "upstream's policy": (worst_fit, 500),
}
TEN_MILLION = [name for name in POLICIES if name != "ours, window of 500"]
CASES = [Case(1_000_000, capacity, policy) for capacity in (4096, 8192, 32768) for policy in POLICIES]
CASES += [Case(10_000_000, 8192, policy) for policy in TEN_MILLION]


def draw(samples: int, capacity: int) -> np.ndarray:
    """Lengths of samples, a part at a time: what drawing frees would hide what packing takes."""
    rng, part = np.random.default_rng(0), 100_000
    lengths = np.empty(samples, np.int32)
    for first in range(0, samples, part):
        drawn = rng.lognormal(math.log(MEDIAN), SIGMA, min(part, samples - first))
        lengths[first : first + part] = np.clip(drawn, 1, capacity)
    return lengths


def measure(case: Case) -> dict[str, float]:
    """Seconds, fullness and added peak memory of packing all lengths, a window at a time."""
    pack, window = POLICIES[case.policy]
    lengths = draw(case.samples, case.capacity)
    window = window or case.samples
    held = _peak_mb()
    start = time.perf_counter()
    made = [pack(lengths[first : first + window], case.capacity) for first in range(0, len(lengths), window)]
    packs = concatenate_packs([part for part in made if isinstance(part, Packs)])
    seconds = time.perf_counter() - start
    rows = len(packs) + sum(part for part in made if isinstance(part, int))
    if len(packs):
        assert len(packs.members) == case.samples, "every sample lies in one pack"
    return {
        "seconds": seconds,
        "full": int(lengths.sum(dtype=np.int64)) / (rows * case.capacity),
        "peak_mb": _peak_mb() - held,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(case: Case) -> dict[str, float]:
    """The same, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--case", json.dumps(case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(*json.loads(options.case)))))
        return
    figures: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in counted(range(options.rounds), "packing"):
        for case, runs in figures.items():
            runs.append(measured(case))
    lines = [
        "| samples | row length | policy | seconds | samples/s | full | MB |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    for case, runs in figures.items():
        seconds, full, peak = (statistics.median(run[name] for run in runs) for name in ("seconds", "full", "peak_mb"))
        label = f"{case.samples:,} | {case.capacity:,} | {case.policy}"
        lines.append(f"| {label} | {seconds:.2f} | {case.samples / seconds:,.0f} | {full:.2%} | {peak:.0f} |")
    print("\n".join(lines))
    if options.write:
        caption = f"Medians of {options.rounds} rounds. {measured_at('python tools/bench/packing.py --write')}"
        table = "\n".join([*lines, "", caption])
        BENCHMARKS.write_text(with_table("packing", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
