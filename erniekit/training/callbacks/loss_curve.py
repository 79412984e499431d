"""`loss.png`: training and evaluation loss over the steps, drawn from the log file at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from erniekit.training.callbacks.log_file import LOG_FILE, read_log
from erniekit.training.callbacks.unwritten import WarnOnIoError

LOSS_CURVE_FILE = "loss.png"


class LossCurve:
    """Draws the curve of the whole run, including the part before a resume."""

    def __init__(self, output_dir: Path, say: Callable[[str], None] = print) -> None:
        self._output_dir = output_dir
        self._io_errors = WarnOnIoError(str(output_dir / LOSS_CURVE_FILE), say)

    def on_train_end(self, _result: object) -> None:
        with self._io_errors.warned():
            draw_loss_curve(self._output_dir / LOG_FILE, self._output_dir / LOSS_CURVE_FILE)


def draw_loss_curve(log: Path, picture: Path) -> None:
    """Draw what `log` (training_log.jsonl) holds; nothing when it holds no loss."""
    records = list(read_log(log))
    trained = [(record["step"], record["loss"]) for record in records if record.get("loss") is not None]
    evaluated = [(record["step"], record["eval_loss"]) for record in records if record.get("eval_loss") is not None]
    if not trained and not evaluated:
        return
    from matplotlib.figure import Figure  # 0.3 s, and only needed here

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss per target token")
    for points, label, style in ((trained, "training", "-"), (evaluated, "evaluation", "o-")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
