"""The callbacks of an ordinary run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from erniekit.training.callbacks.console import PlainLines
from erniekit.training.callbacks.files import LogFile, LossCurve, Results
from erniekit.training.callbacks.trackers import event_logs


def default_callbacks(
    output_dir: Path,
    *,
    logging_dir: Path,
    report_to: Sequence[str],
    disable_tqdm: bool,
) -> list[object]:
    """Progress, log file, event files, results and loss curve. Files that cannot be written do not end a run.

    Args:
        report_to: any of "visualdl" and "tensorboard"; empty for no event files.
        disable_tqdm: plain lines even on a terminal.

    Raises:
        ConfigurationError: a package that `report_to` needs is not installed.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    files = [LogFile(output_dir), Results(output_dir), LossCurve(output_dir)]
    return [_progress(disable_tqdm), *files, *event_logs(report_to, logging_dir)]


def _progress(disable_tqdm: bool) -> object:
    if disable_tqdm or not sys.stdout.isatty():
        return PlainLines()
    from erniekit.training.callbacks.live_progress import LiveProgress

    return LiveProgress()
