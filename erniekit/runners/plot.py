"""Draw figures of one run or several: a picture for documents, lines of text for the terminal. Needs no Paddle."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.errors import ConfigurationError, UserError
from erniekit.terminal import escape_control_characters
from erniekit.training.callbacks.loss_curve import LOGARITHMIC_FROM, SMOOTHED_FROM, smoothed
from erniekit.training.checkpoint.manifest import atomic_write_bytes
from erniekit.training.run_records import Points, RunRecords, read_run

USUAL = ("loss", "learning_rate", "tokens_per_second", "grad_norm")
_LABELS = {"tokens_per_second": "tokens/s", "grad_norm": "gradient norm"}
_INSTALL = "pip install 'erniekit[logs]'"
TEXT_HEIGHT, NARROWEST, WIDEST = 15, 40, 120  # lines, columns


class Curve(NamedTuple):
    """One figure of one run: its points of training, those of evaluations, and a mean over some of the former."""

    run: str
    trained: Points
    evaluated: Points
    mean: Points


class Chart(NamedTuple):
    """One figure of all runs that have it."""

    title: str
    axis: str
    logarithmic: bool
    curves: list[Curve]


def read_charts(
    folders: Sequence[Path], figures: Sequence[str] = (), axis: str = "steps", smooth: int | None = None
) -> list[Chart]:
    """Read runs and return what to draw of them.

    Args:
        folders: the `output_dir` of each run.
        figures: names of figures in the records, without `eval_`; none: loss, learning rate, throughput and gradient
            norm, as far as there are records of them.
        axis: "steps", "tokens" or "hours".
        smooth: records over which a mean is taken; 1: none is drawn; None: a fiftieth of a long run.

    Raises:
        DataError: a folder has no records.
        ConfigurationError: no run has one of the figures that were named.
    """
    runs = [read_run(folder) for folder in folders]
    names = _names(folders, runs)
    charts = []
    for figure in figures or USUAL:
        curves = [
            Curve(name, trained, evaluated, _mean(trained, smooth))
            for name, run in zip(names, runs, strict=True)
            for trained, evaluated in [run.points(figure, axis)]
            if trained or evaluated
        ]
        if curves:
            charts.append(Chart(_LABELS.get(figure, figure.replace("_", " ")), axis, _is_wide(figure, curves), curves))
        elif figures:
            known = ", ".join(dict.fromkeys(name for run in runs for name in run.figures))
            raise ConfigurationError(f"--figures {figure}: no run has a figure of this name; there are {known}")
    return charts


def _names(folders: Sequence[Path], runs: Sequence[RunRecords]) -> list[str]:
    """Return the names of the folders; their paths where two have the same name."""
    names = [run.name for run in runs]
    unique = len(set(names)) == len(names)
    return [escape_control_characters(name if unique else str(path)) for name, path in zip(names, folders, strict=True)]


def _mean(points: Points, smooth: int | None) -> Points:
    if smooth == 1 or len(points) < (SMOOTHED_FROM if smooth is None else 2):
        return []
    return smoothed(points, None if smooth is None else max(1, smooth // 2))


def _is_wide(figure: str, curves: Sequence[Curve]) -> bool:
    """Whether a loss falls by so much that only a logarithmic axis shows its end."""
    values = [value for curve in curves for _, value in (*curve.trained, *curve.evaluated)]
    return figure.endswith("loss") and min(values) > 0 and max(values) / min(values) >= LOGARITHMIC_FROM


def write_picture(charts: Sequence[Chart], path: Path) -> None:
    """Write a PNG picture with all charts, two in a row.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # 0.3 s
    except ImportError:
        raise UserError(f"pictures need matplotlib, which is not installed ({_INSTALL})") from None
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(7 * columns, 3.8 * rows), layout="constrained")
    for number, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(rows, columns, number), chart)
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters of names that the font lacks
        figure.savefig(content, format="png", dpi=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content.getvalue())
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written: {error.strerror or error}") from None


def _draw(axes: Any, chart: Chart) -> None:
    axes.set(xlabel=chart.axis, ylabel=chart.title)
    for number, curve in enumerate(chart.curves):
        colour, name = f"C{number}", curve.run.replace("$", r"\$")  # $ begins a formula
        if curve.mean:
            axes.plot(*zip(*curve.trained, strict=True), color=colour, alpha=0.3, linewidth=1)
        if shown := curve.mean or curve.trained:
            axes.plot(*zip(*shown, strict=True), color=colour, label=f"{name} (mean)" if curve.mean else name)
        if curve.evaluated:
            axes.plot(*zip(*curve.evaluated, strict=True), "o--", color=colour, label=f"{name}, evaluation")
    if chart.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()


def text_lines(charts: Sequence[Chart], width: int | None = None, *, colours: bool = False) -> Iterator[str]:
    """Yield the charts as text, one after the other.

    Args:
        width: columns; None: those of the terminal.

    Raises:
        UserError: plotext is not installed.
    """
    try:
        import plotext
    except ImportError:
        raise UserError(f"charts in the terminal need plotext, which is not installed ({_INSTALL})") from None
    columns = min(WIDEST, max(NARROWEST, width or shutil.get_terminal_size().columns))
    for chart in charts:
        plotext.clear_figure()
        plotext.theme("pro" if colours else "clear")
        plotext.plotsize(columns, TEXT_HEIGHT)
        plotext.title(f"{chart.title} over {chart.axis}")
        if chart.logarithmic:
            plotext.yscale("log")
        for curve in chart.curves:
            if shown := curve.mean or curve.trained:
                plotext.plot(*map(list, zip(*shown, strict=True)), label=curve.run, marker="braille")
            if curve.evaluated:
                plotext.scatter(
                    *map(list, zip(*curve.evaluated, strict=True)), label=f"{curve.run}, evaluation", marker="o"
                )
        text = plotext.build()
        yield text if colours else plotext.uncolorize(text)
