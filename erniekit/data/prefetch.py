"""Read ahead of the training loop in threads; the order of steps never depends on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from erniekit.data.batches import Batch
from erniekit.data.plan import StepPlan


def prefetch(plan: StepPlan, start: int, workers: int, stop: int | None = None) -> Generator[list[Batch], None, None]:
    """Yield plan.micro_batches(step) for step = start, start + 1, ... (below `stop`), prepared by `workers` threads.

    With 0 workers everything happens in the caller's thread; what `plan.through` does happens there in any case. An
    exception in a worker is raised here, as it was, when the loop comes to its step.
    """
    steps = iter(count(start) if stop is None else range(start, stop))
    if workers == 0:
        for step in steps:
            yield plan.micro_batches(step)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="data") as pool:
        ahead: deque[Future[list[Batch]]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(plan.read, step))
                if len(ahead) > workers:
                    yield plan.batch_source(ahead.popleft().result)
            while ahead:
                yield plan.batch_source(ahead.popleft().result)
        finally:  # also when the loop stops early
            for future in ahead:
                future.cancel()
