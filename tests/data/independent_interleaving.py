"""Interleaving written a second time, from the published rules alone, one step after another on plain lists.

It takes an aligner's intervals with the pauses among them, as a TextGrid has them, and draws that are given. It shares
nothing with `erniekit.data.interleave`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

Interval = dict[str, Any]  # mark, begin, end


def interval(mark: str, begin: float, end: float) -> Interval:
    return {"mark": mark, "begin": begin, "end": end}


def words_on_units(intervals: list[Interval], num_units: int) -> list[Interval]:
    """Give the pauses to the words around them, count in units, and join words without units to others."""
    grid = [dict(item) for item in intervals]
    per_second = num_units / grid[-1]["end"]
    last = len(grid) - 1
    for place, item in enumerate(grid):
        if item["mark"].strip():
            continue
        if place == 0:
            grid[1]["begin"] = item["begin"]
        elif place == last:
            grid[place - 1]["end"] = item["end"]
        else:
            border = round(grid[place - 1]["end"] + (item["end"] - item["begin"]) / 2, 2)
            grid[place - 1]["end"] = grid[place + 1]["begin"] = border
    words = [item for item in grid if item["mark"].strip()]
    for item in words:
        item["begin"], item["end"] = round(item["begin"] * per_second), round(item["end"] * per_second)
    place = 0
    while place < len(words):
        empty = words[place]["begin"] == words[place]["end"]
        if not empty or len(words) == 1:
            place += 1
        elif place == 0:
            words[0:2] = [_together(words[0:2])]
        elif place == len(words) - 1:
            words[place - 1 :] = [_together(words[place - 1 :])]
            place = len(words)
        elif words[place + 1]["begin"] != words[place + 1]["end"]:
            words[place - 1 : place + 2] = [_together(words[place - 1 : place + 2])]
        else:
            words[place - 1 : place + 1] = [_together(words[place - 1 : place + 1])]
    return words


def _together(words: list[Interval]) -> Interval:
    return interval(" ".join(word["mark"] for word in words), words[0]["begin"], words[-1]["end"])


def interleaved(
    words: list[Interval],
    units: list[int],
    encode: Callable[[str], list[int]],
    draws: Iterator[float],
    *,
    segment_units: float,
    bos: int,
    eos: int,
    go_on: int,
    same: int,
    unit_id: Callable[[int], int],
) -> list[int] | None:
    """Return the token ids of one epoch; None for too few words.

    Args:
        draws: uniform numbers: one for each border, then two for each segment.
    """
    if len(words) < 3:
        return None
    total = words[-1]["end"]
    parts = int(total // segment_units) + 1
    borders = [word["begin"] for word in words] + [total]
    chosen = {0, len(words)}
    for part in range(1, parts):
        middle, deviation = total / parts * part, total / (2 * parts)
        drawn = middle + deviation * quantile(next(draws), total / parts / deviation)
        distances = [abs(border - drawn) for border in borders]
        chosen.add(distances.index(min(distances)))
    marks = sorted(chosen)
    kinds = [(next(draws), next(draws)) for _ in range(parts)]
    ids, before = [bos], ""
    for (first, stop), (kind_draw, same_draw) in zip(pairwise(marks), kinds, strict=False):
        part_words = words[first:stop]
        of_kind = {
            "text": encode(" ".join(word["mark"] for word in part_words)),
            "unit": [unit_id(unit) for unit in units[part_words[0]["begin"] : part_words[-1]["end"]]],
        }
        kind = "text" if kind_draw >= 0.5 else "unit"
        if before and before != kind:
            ids.append(go_on)
        ids += of_kind[kind]
        before = kind
        if same_draw >= 0.5:
            other = "unit" if kind == "text" else "text"
            ids += [same, *of_kind[other]]
            before = other
    return [*ids, eos]


def quantile(uniform: float, width: float) -> float:
    """The standard normal distribution between -width and width, turned around by bisection."""

    def below(value: float) -> float:
        return (1 + math.erf(value / math.sqrt(2))) / 2

    wanted = below(-width) + uniform * (below(width) - below(-width))
    low, high = -width, width
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < wanted else (low, middle)
    return low


def random_alignment(seed: int, words: list[str], *, longest_s: float = 35.0) -> tuple[list[Interval], list[int]]:
    """Synthetic intervals and units: pauses of all lengths, words too short for a unit, at 50 units a second."""
    rng = random.Random(seed)
    time, grid = 0.0, []
    length = rng.uniform(1.0, longest_s)
    while time < length:
        pause = rng.choice([0, 0, 0, rng.uniform(0.01, 0.6)])
        if round(time + pause, 2) > round(time, 2):
            grid.append(interval("", round(time, 2), round(time + pause, 2)))
            time = round(time + pause, 2)
        spoken = rng.choice([0.01, 0.02, *(rng.uniform(0.05, 0.7) for _ in range(6))])
        end = round(time + max(spoken, 0.01), 2)
        grid.append(interval(rng.choice(words), round(time, 2), end))
        time = end
    if rng.random() < 0.5:
        grid.append(interval("", time, round(time + rng.uniform(0.05, 0.5), 2)))
    num_units = max(1, round(grid[-1]["end"] * 50) - rng.randint(0, 1))
    return grid, [rng.randrange(100) for _ in range(num_units)]
