"""The callbacks of an ordinary run."""

from __future__ import annotations

import sys
from pathlib import Path

from erniekit.config.sections.basic import BasicParameters
from erniekit.training.callbacks import Callback
from erniekit.training.callbacks.closing_lines import ClosingLines
from erniekit.training.callbacks.console import PlainLines
from erniekit.training.callbacks.files import LogFile, Results
from erniekit.training.callbacks.loss_curve import LossCurve
from erniekit.training.callbacks.trackers import installed_trackers, open_trackers


def default_callbacks(section: BasicParameters, *, skip_missing_trackers: bool = False) -> list[Callback]:
    """Build the callbacks for progress, files, trackers of `report_to` and the closing lines, which come last.

    A file that cannot be written does not end a run.

    Args:
        skip_missing_trackers: do without a tracker whose package is not installed, with a log line; for defaults.

    Raises:
        ConfigurationError: a package that `report_to` needs is not installed.
    """
    output_dir = Path(section.output_dir).expanduser()
    output_dir.mkdir(parents=True, exist_ok=True)
    names = installed_trackers(section.report_to) if skip_missing_trackers else section.report_to
    trackers = open_trackers(names, Path(section.logging_dir).expanduser())
    logs = Path(section.logging_dir).expanduser() if trackers else None
    files = [LogFile(output_dir), Results(output_dir), LossCurve(output_dir)]
    return [_progress(section), *files, *trackers, ClosingLines(logs, names)]


def _progress(section: BasicParameters) -> Callback:
    if section.disable_tqdm or not sys.stdout.isatty():
        return PlainLines()
    from erniekit.training.callbacks.live_progress import LiveProgress

    return LiveProgress()
