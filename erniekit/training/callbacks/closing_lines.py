"""The last lines of a finished run: time, loss, what is where, and what to do next."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.console import duration
from erniekit.training.callbacks.files import LOG_FILE, LOSS_CURVE_FILE, read_log

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

logger = logging.getLogger(__name__)
VIEWERS = {
    "visualdl": "visualdl --logdir {folder}",
    "tensorboard": "tensorboard --logdir {folder}",
    "wandb": "",  # each of these has said itself where the run can be seen
    "mlflow": "",
    "swanlab": "",
    "trackio": "",
}


class ClosingLines(Callback):
    """Writes them once the model is saved. Must come after the callbacks that write files.

    Args:
        logging_dir: the folder of event files; None: no tracker writes any.
        trackers: the names of those that do.
    """

    def __init__(self, logging_dir: Path | None, trackers: Sequence[str]) -> None:
        self._logging_dir, self._trackers = logging_dir, trackers
        self._output_dir = Path()
        self._first_use = "chat {folder}"
        self._is_evaluated = False
        self._started = 0.0

    def on_train_begin(self, run: TrainingRun) -> None:
        self._output_dir, self._started = run.output_dir, time.monotonic()
        if run.config.get("stage") == "PT":  # it continues texts, and has learnt no dialogue
            self._first_use = "generate --raw --prompt TEXT {folder}"
        elif run.config.get("stage") == "TTS":
            self._first_use = "speak {folder} --text TEXT --output FILE.wav"
        elif run.config.get("stage") == "RM":
            self._first_use = "score {folder} DATA.jsonl"
        elif "asr" in (run.config.get("train_dataset_type") or ()):
            self._first_use = "transcribe {folder} RECORDINGS"

    def on_evaluate(self, record: Record) -> None:
        self._is_evaluated = True

    def on_train_end(self, result: TrainResult) -> None:
        for line in self._lines(result):
            logger.info(line)

    def _lines(self, result: TrainResult) -> list[str]:
        folder, log = self._output_dir, self._output_dir / LOG_FILE
        records = [record for record in read_log(log) if record.get("loss") is not None]
        name = "reward" if any("reward" in record for record in records) else "loss"  # a policy's loss tells nothing
        values = [record[name] for record in records if name in record]
        changed = f", {name} {values[0]:.4f} -> {values[-1]:.4f}" if values else ""
        lines = [f"done: {result.step:,} steps, {duration(time.monotonic() - self._started)}{changed}"]
        if result.best.step is not None:
            value, metric = f"{result.best.value:.4g}", result.best.metric.removeprefix("eval_").replace("_", " ")
            lines.append(f"  best evaluation: {metric} {value} at step {result.best.step:,}")
        if (folder / LOSS_CURVE_FILE).is_file():
            lines.append(f"  curve: {folder / LOSS_CURVE_FILE}; every figure: {log}")
        for name in self._trackers if self._logging_dir else ():
            if viewer := VIEWERS[name]:
                lines.append("  " + viewer.replace("{folder}", shlex.quote(str(self._logging_dir))))
        shown = shlex.quote(str(folder))
        commands = [
            self._first_use.replace("{folder}", shown),
            *([f"eval {shown}"] * self._is_evaluated),
            f"export {shown} --output DIR",
        ]
        return [*lines, "next:", *(f"  erniekit {command}" for command in commands)]
