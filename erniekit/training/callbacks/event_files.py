"""Event files of a run for VisualDL and TensorBoard, which this process writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.files import WarnOnIoError
from erniekit.training.callbacks.reported import (
    card_of,
    evaluation_figures,
    facts_of,
    picture_of,
    samples_of,
    table_of,
    training_figures,
)

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult


class EventWriter(Protocol):
    """What `visualdl.LogWriter` and `tensorboardX.SummaryWriter` have in common. Arrays are [H, W, 3] and [samples]."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any: ...
    def add_text(self, tag: str, text: str, step: int, /) -> Any: ...
    def close(self) -> Any: ...


class EventLog(Callback):
    """Write every metric of every log and evaluation as a scalar, `train/loss` or `eval/loss`; texts, pictures and
    sound beside them.

    An error of the writer is told once, and the run goes on.
    """

    def __init__(self, writer: EventWriter, io_errors: WarnOnIoError) -> None:
        self._writer, self._io_errors = writer, io_errors
        self._run: TrainingRun | None = None

    def on_train_begin(self, run: TrainingRun) -> None:
        self._run = run
        for name, values in facts_of(run).items():
            self._write_json(name, values, run.first_step)

    def on_log(self, record: Record) -> None:
        self._write(training_figures(record), record["step"])

    def on_evaluate(self, record: Record) -> None:
        step = record["step"]
        self._write(evaluation_figures(record), step)
        samples = samples_of(self._run.output_dir, record) if self._run else []
        if not samples:
            return
        with self._io_errors.warned():
            self._writer.add_text("samples", table_of(samples), step)
            for number, sample in enumerate(samples):
                if "sound" in sample:
                    add_sound(self._writer, f"samples/{number}", Path(sample["sound"]), step)

    def on_train_end(self, result: TrainResult) -> None:
        if self._run is None:
            return
        self._write_json("model card", card_of(self._run, result), result.step)
        with self._io_errors.warned():
            if picture := picture_of(self._run.output_dir):
                add_picture(self._writer, "loss", Path(picture), result.step)

    def close(self) -> None:
        with self._io_errors.warned():
            self._writer.close()

    def _write(self, figures: dict[str, float], step: int) -> None:
        with self._io_errors.warned():
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def _write_json(self, name: str, values: Any, step: int) -> None:
        with self._io_errors.warned():
            self._writer.add_text(name, json.dumps(values, indent=2, ensure_ascii=False, default=str), step)


def add_picture(writer: Any, name: str, path: Path, step: int) -> None:
    """Write a PNG file as a picture."""
    import numpy as np
    from matplotlib.image import imread  # it has drawn the picture

    pixels = (imread(path)[:, :, :3] * 255).astype(np.uint8)
    writer.add_image(name, pixels, step, dataformats="HWC")


def add_sound(writer: Any, name: str, path: Path, step: int) -> None:
    """Write a WAV file of 16-bit samples as sound."""
    import wave

    import numpy as np

    with wave.open(str(path)) as file:
        rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    writer.add_audio(name, (samples / 32768.0).astype(np.float32)[:, None], step, rate)  # [samples, 1], from -1 to 1
