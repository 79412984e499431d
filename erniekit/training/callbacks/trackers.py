"""Experiment trackers, which `report_to` names: event files for VisualDL and TensorBoard.

To add a tracker, write a `Callback` and a function that opens it here, add it to `TRACKERS`, name it in `TRACKERS` of
`erniekit/config/sections/basic.py`, and add its package to an extra of the installation. `on_train_begin` gives it the
name and the parameters of the run.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from erniekit.errors import ConfigurationError
from erniekit.training.callbacks import Callback, Record
from erniekit.training.callbacks.files import WarnOnIoError

logger = logging.getLogger(__name__)
_PROGRESS = {"step", "epoch"}


class EventWriter(Protocol):
    """What `visualdl.LogWriter` and `tensorboardX.SummaryWriter` have in common."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any: ...
    def close(self) -> Any: ...


class EventLog(Callback):
    """Write every metric of every log and evaluation as a scalar, `train/loss` or `eval/loss`."""

    def __init__(self, writer: EventWriter, io_errors: WarnOnIoError) -> None:
        self._writer, self._io_errors = writer, io_errors

    def on_log(self, record: Record) -> None:
        self._write("train", record)

    def on_evaluate(self, record: Record) -> None:
        metrics = {name.removeprefix("eval_"): value for name, value in record.items() if name != "eval_sources"}
        self._write("eval", metrics)

    def close(self) -> None:
        with self._io_errors.warned():
            self._writer.close()

    def _write(self, group: str, record: Record) -> None:
        with self._io_errors.warned():
            for name, value in record.items():
                if name not in _PROGRESS and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{name}", value, record["step"])


def _visualdl(logging_dir: Path) -> Callback:
    from visualdl import LogWriter

    return EventLog(LogWriter(logdir=str(logging_dir)), _io_errors("visualdl", logging_dir))


def _tensorboard(logging_dir: Path) -> Callback:
    from tensorboardX import SummaryWriter

    return EventLog(SummaryWriter(logdir=str(logging_dir)), _io_errors("tensorboard", logging_dir))


def _io_errors(name: str, logging_dir: Path) -> WarnOnIoError:
    return WarnOnIoError(f"the event files of {name} in {logging_dir}")


class Tracker(NamedTuple):
    """How a tracker is opened.

    Attributes:
        package: what must be installed, and is only imported by `open`.
        open: `logging_dir` -> the callback.
    """

    package: str
    open: Callable[[Path], Callback]


TRACKERS = {
    "visualdl": Tracker("visualdl", _visualdl),
    "tensorboard": Tracker("tensorboardX", _tensorboard),
}


def open_trackers(report_to: Sequence[str], logging_dir: Path) -> list[Callback]:
    """Open the trackers that `report_to` names.

    Raises:
        ConfigurationError: a package is not installed, or `logging_dir` cannot be written.
    """
    if report_to:
        _check_writable(logging_dir)
    return [_open(name, logging_dir) for name in report_to]


def refuse_missing_trackers(report_to: Sequence[str]) -> None:
    """Raise ConfigurationError if the package of a tracker is not installed."""
    for name in report_to:
        if importlib.util.find_spec(TRACKERS[name].package) is None:
            raise ConfigurationError(_not_installed(name))


def installed_trackers(report_to: Sequence[str]) -> list[str]:
    """Return those of `report_to` whose package is installed; a log line names the others."""
    missing = [name for name in report_to if importlib.util.find_spec(TRACKERS[name].package) is None]
    for name in missing:
        logger.info(f"no event files for {name}: it is not installed (pip install 'erniekit[logs]')")
    return [name for name in report_to if name not in missing]


def _check_writable(logging_dir: Path) -> None:
    try:
        logging_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logging_dir):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"logging_dir {logging_dir} cannot be written: {error.strerror}\n"
            "  Write another logging_dir, or report_to: none"
        ) from None


def _open(name: str, logging_dir: Path) -> Callback:
    tracker = TRACKERS[name]
    try:
        return tracker.open(logging_dir)
    except ImportError as error:
        if error.name != tracker.package:
            raise
        raise ConfigurationError(_not_installed(name)) from None


def _not_installed(name: str) -> str:
    return (
        f"report_to: {name} needs the package {TRACKERS[name].package}, which is not installed.\n"
        "  Install it (pip install 'erniekit[logs]'), or write report_to: none"
    )
