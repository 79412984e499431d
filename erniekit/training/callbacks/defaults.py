"""The callbacks of an ordinary run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    say: Callable[[str], None] = print,
) -> list[object]:
    """Progress, log file, event files, results and loss curve.

    Args:
        report_to: any of "visualdl" and "tensorboard"; empty for no event files.
        disable_tqdm: plain lines even on a terminal.
        say: told what cannot be written; none of these files is worth ending a run.

    Raises:
        ConfigurationError: a package that `report_to` needs is not installed.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    files = [LogFile(output_dir, say), Results(output_dir, say), LossCurve(output_dir, say)]
    return [_progress(disable_tqdm), *files, *event_logs(report_to, logging_dir, say)]


def _progress(disable_tqdm: bool) -> object:
    if disable_tqdm or not sys.stdout.isatty():
        return PlainLines()
    from erniekit.training.callbacks.live_progress import LiveProgress

    return LiveProgress()
