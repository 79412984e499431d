"""Experiment trackers, which `report_to` names.

VisualDL and TensorBoard read event files, which this process writes (`event_files`). The clients of services run in a
process of their own (`tracker_process`), because they are slow to import, wait for networks, and end when they like.

To add a service, write its client in `tracker_clients`, add it to `TRACKERS` here, name it in `TRACKERS` of
`erniekit/config/sections/basic.py`, and add its package to an extra of the installation.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from erniekit.errors import ConfigurationError
from erniekit.redaction import redacted
from erniekit.training.callbacks import Callback
from erniekit.training.callbacks.event_files import EventLog
from erniekit.training.callbacks.files import WarnOnIoError
from erniekit.training.callbacks.tracker_process import TrackerProcess

logger = logging.getLogger(__name__)


def _visualdl(logging_dir: Path) -> Callback:
    from visualdl import LogWriter

    return EventLog(LogWriter(logdir=str(logging_dir)), _io_errors("visualdl", logging_dir))


def _tensorboard(logging_dir: Path) -> Callback:
    from tensorboardX import SummaryWriter

    return EventLog(SummaryWriter(logdir=str(logging_dir)), _io_errors("tensorboard", logging_dir))


def _io_errors(name: str, logging_dir: Path) -> WarnOnIoError:
    return WarnOnIoError(f"the event files of {name} in {logging_dir}", Exception)


class Tracker(NamedTuple):
    """How a tracker is opened.

    Attributes:
        package: what must be installed, and is imported by nothing but `open` and the process of a client.
        extra: the extra of the installation that has it.
        open: `logging_dir` -> the callback.
    """

    package: str
    extra: str
    open: Callable[[Path], Callback]


TRACKERS = {
    "visualdl": Tracker("visualdl", "logs", _visualdl),
    "tensorboard": Tracker("tensorboardX", "logs", _tensorboard),
    **{name: Tracker(name, name, partial(TrackerProcess, name)) for name in ("wandb", "mlflow", "swanlab", "trackio")},
}


def open_trackers(report_to: Sequence[str], logging_dir: Path) -> list[Callback]:
    """Open the trackers that `report_to` names. One that cannot be opened is told, and left out.

    Raises:
        ConfigurationError: a package is not installed, or `logging_dir` cannot be written.
    """
    if report_to:
        _check_writable(logging_dir)
    opened = (_open(name, logging_dir) for name in report_to)
    return [tracker for tracker in opened if tracker is not None]


def refuse_missing_trackers(report_to: Sequence[str]) -> None:
    """Raise ConfigurationError if the package of a tracker is not installed."""
    for name in report_to:
        if not _is_installed(TRACKERS[name].package):
            raise ConfigurationError(_not_installed(name))


def installed_trackers(report_to: Sequence[str]) -> list[str]:
    """Return those of `report_to` whose package is installed; a log line names the others."""
    missing = [name for name in report_to if not _is_installed(TRACKERS[name].package)]
    for name in missing:
        logger.info(f"no event files for {name}: it is not installed (pip install 'erniekit[{TRACKERS[name].extra}]')")
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


def _open(name: str, logging_dir: Path) -> Callback | None:
    tracker = TRACKERS[name]
    try:
        return tracker.open(logging_dir)
    except Exception as error:  # whatever a library raises ends no run
        if isinstance(error, ImportError) and error.name == tracker.package:
            raise ConfigurationError(_not_installed(name)) from None
        logger.warning(f"report_to: {name} cannot be opened: {redacted(str(error))}; the run goes on without it")
        return None


def _not_installed(name: str) -> str:
    tracker = TRACKERS[name]
    return (
        f"report_to: {name} needs the package {tracker.package}, which is not installed.\n"
        f"  Install it (pip install 'erniekit[{tracker.extra}]'), or write report_to: none"
    )


def _is_installed(package: str) -> bool:
    """Return whether a package is installed; a folder `wandb` of runs, in the current folder, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
