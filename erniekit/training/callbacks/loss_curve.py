"""`loss.png`: training and evaluation loss over the steps, drawn from the log file while the run goes on."""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.files import LOG_FILE, LOSS_CURVE_FILE, WarnOnIoError, read_log
from erniekit.training.checkpoint.manifest import atomic_write_bytes

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

SECONDS_BETWEEN = 60.0  # from one drawing to the next
SHARE = 0.02  # of a run's time that drawing may take
SMOOTHED_FROM = 50  # points from which on a mean is drawn beside them
LOGARITHMIC_FROM = 10.0  # ratio of the largest to the smallest loss
X = TypeVar("X", int, float)  # where a point stands on the axis


class LossCurve(Callback):
    """Draws the curve of the whole run, including the part before a resume.

    Must come after `LogFile`, whose lines it draws. A drawing takes a third of a second, and more with a long log, so
    there is one at most every `SECONDS_BETWEEN`, and one at the end.
    """

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._io_errors = WarnOnIoError(str(output_dir / LOSS_CURVE_FILE))
        self._title = ""
        self._next = 0.0

    def on_train_begin(self, run: TrainingRun) -> None:
        model = str(run.config.get("model_name_or_path", "")).rstrip("/").rpartition("/")[2]
        self._title = " \N{MIDDLE DOT} ".join(filter(None, (run.name, run.config.get("stage"), model)))
        self._next = time.monotonic() + SECONDS_BETWEEN

    def on_log(self, record: Record) -> None:
        self._draw_if_due()

    def on_evaluate(self, record: Record) -> None:
        self._draw_if_due()

    def on_save(self, folder: Path) -> None:
        self._draw_if_due()

    def on_train_end(self, result: TrainResult) -> None:
        self._draw()

    def _draw_if_due(self) -> None:
        if time.monotonic() >= self._next:
            started = time.monotonic()
            self._draw()
            now = time.monotonic()
            self._next = now + max(SECONDS_BETWEEN, (now - started) / SHARE)

    def _draw(self) -> None:
        with self._io_errors.warned():
            draw_loss_curve(self._output_dir / LOG_FILE, self._output_dir / LOSS_CURVE_FILE, self._title)


def draw_loss_curve(log: Path, picture: Path, title: str = "") -> None:
    """Draw what `log` (training_log.jsonl) holds; nothing when it holds no loss.

    Many points of training are drawn pale, with their mean over a fiftieth of the curve. The axis is logarithmic where
    the loss falls by a factor of ten.

    Raises:
        OSError: the picture cannot be written, or matplotlib is not installed.
    """
    records = list(read_log(log))
    trained = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    evaluated = [(record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None]
    if not trained and not evaluated:
        return
    try:
        from matplotlib.figure import Figure  # 0.3 s, and only needed here
    except ImportError:
        raise OSError("matplotlib is not installed (pip install 'erniekit[logs]')") from None

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=title.replace("$", r"\$"))  # $ begins a formula
    if len(trained) >= SMOOTHED_FROM:
        axes.plot(*zip(*trained, strict=True), color="C0", alpha=0.3, linewidth=1)
        axes.plot(*zip(*smoothed(trained), strict=True), color="C0", label="training (mean)")
    elif trained:
        axes.plot(*zip(*trained, strict=True), color="C0", label="training")
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", color="C1", label="evaluation")
    losses = [loss for _, loss in (*trained, *evaluated)]
    if min(losses) > 0 and max(losses) / min(losses) >= LOGARITHMIC_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters of the title that the font lacks
        figure.savefig(content, format="png", dpi=120)
    atomic_write_bytes(picture, content.getvalue())


def smoothed(points: Sequence[tuple[X, float]], reach: int | None = None) -> list[tuple[X, float]]:
    """Return each point's mean with its neighbours on both sides, fewer at its ends.

    Args:
        reach: neighbours on each side; None: so many that they are a fiftieth of the curve in all.
    """
    reach = max(1, len(points) // 100) if reach is None else reach
    sums = [0.0, *accumulate(loss for _, loss in points)]
    windows = ((max(0, index - reach), min(len(points), index + reach + 1)) for index in range(len(points)))
    return [
        (step, (sums[stop] - sums[start]) / (stop - start))
        for (step, _), (start, stop) in zip(points, windows, strict=True)
    ]
