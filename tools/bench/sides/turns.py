"""How a side of a comparison is asked for steps and answers. Standard library only: every peer's environment reads it.

A request is a line of JSON, {"steps": n}; the answer says how long they took, their losses, and the tokens in them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Step = Callable[[int], tuple[float, int]]  # the number of a step, from 0 -> its loss, useful tokens


def answer(start: float, losses: list[float], tokens: int, **more: float) -> None:
    """Print what a turn gave; `start` is time.perf_counter's."""
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"seconds": seconds, "losses": losses, "tokens": tokens, "peak_mb": peak, **more}
    print("\nANSWER " + json.dumps(figures), flush=True)


def serve(step: Step) -> None:
    """Make the steps that are asked for, until the requests end."""
    number = 0
    for line in sys.stdin:
        start = time.perf_counter()
        losses, tokens = [], 0
        for _ in range(json.loads(line)["steps"]):
            loss, count = step(number)
            losses.append(loss)
            tokens += count
            number += 1
        answer(start, losses, tokens)


def ahead(make: Callable[[int], Any]) -> Iterator[Any]:
    """Yield make(0), make(1), ..., each made in a thread while the caller works on the last."""
    with ThreadPoolExecutor(1) as pool:
        number, coming = 1, pool.submit(make, 0)
        while True:
            made, coming = coming.result(), pool.submit(make, number)
            number += 1
            yield made


class Gate:
    """The same for a trainer that has a loop of its own: it waits before a step, and is told what the step gave."""

    def __init__(self) -> None:
        self._left, self._start, self._tokens = 0, 0.0, 0
        self._losses: list[float] = []
        self._more: dict[str, float] = {}

    def wait(self) -> None:
        """Before a step: hold until it is asked for; the process ends where no more are."""
        if self._left:
            return
        line = sys.stdin.readline()
        if not line:
            sys.stdout.flush()
            os._exit(0)
        self._left, self._losses, self._tokens, self._more = json.loads(line)["steps"], [], 0, {}
        self._start = time.perf_counter()

    def saw(self, tokens: int, **more: float) -> None:
        """Within a step: useful tokens of what it works on, and further figures to be added up."""
        self._tokens += tokens
        for name, value in more.items():
            self._more[name] = self._more.get(name, 0.0) + value

    def passed(self, loss: float) -> None:
        """After a step."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            answer(self._start, self._losses, self._tokens, **self._more)
