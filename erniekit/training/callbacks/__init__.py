"""Callbacks: what a run shows and records.

To add one, subclass `Callback` and override the hooks that it needs. A callback must not change the model or the state
of the run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

Record = Mapping[str, Any]  # metrics by name, with "step" and "epoch"


class TrainingRun(NamedTuple):
    """What callbacks learn of a run before its first step.

    Attributes:
        name: the name of `output_dir`.
        config: every parameter with its resolved value, as JSON holds it.
        first_step: the finished steps, which are more than 0 in a resumed run.
        total_steps: the number of finished steps at which the run ends.
    """

    name: str
    output_dir: Path
    config: Mapping[str, Any]
    first_step: int
    total_steps: int


class Callback:
    """Base class of callbacks; its hooks do nothing.

    A subclass with a method `on_...` that is not a hook is refused when the class is created, because it would never
    be called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in hooks:
                meant = difflib.get_close_matches(name, hooks, n=1)
                hint = f"did you mean {meant[0]}?" if meant else f"hooks are {', '.join(hooks)}"
                raise TypeError(f"{cls.__qualname__}.{name} is no hook of a callback; {hint}")

    def on_train_begin(self, run: TrainingRun) -> None:
        """Handle the start of training, before its first step."""

    def on_step(self, record: Record) -> None:
        """Handle an update; `record` holds the metrics of this step."""

    def on_log(self, record: Record) -> None:
        """Handle a log that is due; `record` holds the metrics of all steps since the last log."""

    def on_evaluate(self, record: Record) -> None:
        """Handle the metrics of an evaluation, `eval_...`."""

    def on_save(self, folder: Path) -> None:
        """Handle a checkpoint that is complete."""

    def on_train_end(self, result: TrainResult) -> None:
        """Handle the end of a finished run; a run that a signal stopped does not get here."""

    def close(self) -> None:
        """Release what the callback holds; always called last, also after an error."""


class CallbackList(Callback):
    """Call each hook of several callbacks, in their order.

    Raises:
        TypeError: one of them is no `Callback`.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"{callback!r} is no callback; derive {type(callback).__qualname__} from Callback")

    def on_train_begin(self, run: TrainingRun) -> None:
        for callback in self._callbacks:
            callback.on_train_begin(run)

    def on_step(self, record: Record) -> None:
        for callback in self._callbacks:
            callback.on_step(record)

    def on_log(self, record: Record) -> None:
        for callback in self._callbacks:
            callback.on_log(record)

    def on_evaluate(self, record: Record) -> None:
        for callback in self._callbacks:
            callback.on_evaluate(record)

    def on_save(self, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_save(folder)

    def on_train_end(self, result: TrainResult) -> None:
        for callback in self._callbacks:
            callback.on_train_end(result)

    def close(self) -> None:
        for callback in self._callbacks:
            callback.close()
