"""Event files for VisualDL and TensorBoard. Both writers take (tag, value, step), so one callback serves them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from erniekit.errors import ConfigurationError
from erniekit.training.callbacks.files import WarnOnIoError

_PROGRESS = {"step", "epoch"}


class EventWriter(Protocol):
    """What `visualdl.LogWriter` and `tensorboardX.SummaryWriter` have in common."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any: ...
    def close(self) -> Any: ...


class EventLog:
    """Writes every figure of every log and evaluation as a scalar, `train/loss` or `eval/loss`."""

    def __init__(self, writer: EventWriter, io_errors: WarnOnIoError) -> None:
        self._writer, self._io_errors = writer, io_errors

    def on_log(self, record: Mapping[str, Any]) -> None:
        self._write("train", record)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        metrics = {name.removeprefix("eval_"): value for name, value in record.items() if name != "eval_sources"}
        self._write("eval", metrics)

    def close(self) -> None:
        with self._io_errors.warned():
            self._writer.close()

    def _write(self, group: str, record: Mapping[str, Any]) -> None:
        with self._io_errors.warned():
            for name, value in record.items():
                if name not in _PROGRESS and math.isfinite(value):
                    self._writer.add_scalar(f"{group}/{name}", value, record["step"])


def event_logs(report_to: Sequence[str], logging_dir: Path) -> list[EventLog]:
    """A callback for each of `report_to` ("visualdl", "tensorboard"). The packages are imported only when asked for.

    Raises:
        ConfigurationError: a package is not installed, or `logging_dir` cannot be written.
    """
    if report_to:
        _check_writable(logging_dir)
    io_errors = [WarnOnIoError(f"the event files of {name} in {logging_dir}") for name in report_to]
    return [
        EventLog(_open_writer(name, logging_dir), io_error) for name, io_error in zip(report_to, io_errors, strict=True)
    ]


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


def _open_writer(name: str, logging_dir: Path) -> EventWriter:
    package = {"visualdl": "visualdl", "tensorboard": "tensorboardX"}[name]
    try:
        if name == "visualdl":
            from visualdl import LogWriter

            return LogWriter(logdir=str(logging_dir))
        from tensorboardX import SummaryWriter

        return SummaryWriter(logdir=str(logging_dir))
    except ImportError as error:
        if error.name != package:
            raise
        raise ConfigurationError(
            f"report_to: {name} needs the package {package}, which is not installed.\n"
            f"  Install it (pip install {package}), or write report_to: none"
        ) from None
