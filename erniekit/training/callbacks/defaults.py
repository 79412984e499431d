"""The callbacks of an ordinary run."""

from __future__ import annotations

import sys
from pathlib import Path

from erniekit.config.sections.basic import BasicParameters
from erniekit.training.callbacks import Callback
from erniekit.training.callbacks.console import PlainLines
from erniekit.training.callbacks.files import LogFile, LossCurve, Results
from erniekit.training.callbacks.trackers import open_trackers


def default_callbacks(section: BasicParameters) -> list[Callback]:
    """Build the callbacks for progress, log file, results, loss curve and the trackers of `report_to`.

    A file that cannot be written does not end a run.

    Raises:
        ConfigurationError: a package that `report_to` needs is not installed.
    """
    output_dir = Path(section.output_dir).expanduser()
    output_dir.mkdir(parents=True, exist_ok=True)
    trackers = open_trackers(section.report_to, Path(section.logging_dir).expanduser())
    return [_progress(section), LogFile(output_dir), Results(output_dir), LossCurve(output_dir), *trackers]


def _progress(section: BasicParameters) -> Callback:
    if section.disable_tqdm or not sys.stdout.isatty():
        return PlainLines()
    from erniekit.training.callbacks.live_progress import LiveProgress

    return LiveProgress()
