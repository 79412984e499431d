"""What a run shows and records. A callback is any object with some of these methods; none is required:

on_train_begin(first_step, total_steps)
on_step(record)        after every update; the record covers that step
on_log(record)         when logging is due; the record covers the steps since the last log
on_evaluate(record)
on_save(folder)
on_train_end(result)   the run is finished (not when it was stopped)
close()                always, last; also after an error
"""

from __future__ import annotations

from collections.abc import Iterable


def notify(callbacks: Iterable[object], event: str, *arguments: object) -> None:
    """Call the method `event` of every callback that has one, in order."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*arguments)
