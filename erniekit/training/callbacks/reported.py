"""What trackers are told of a run, as JSON holds it and without secrets. How each is told is its own business."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.environment import package_versions, rounding_settings, usable_cores
from erniekit.redaction import redacted
from erniekit.training.callbacks import Record, TrainingRun
from erniekit.training.callbacks.files import LOSS_CURVE_FILE, SAMPLES_FILE

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

SAMPLES = 8  # answers of an evaluation that trackers get; the file has all
LONGEST = 2000  # characters of each text among them
_PROGRESS = ("step", "epoch")
_CARD_PARAMETERS = (
    "stage", "model_name_or_path", "fine_tuning", "lora", "train_dataset_path", "train_dataset_type",
    "eval_dataset_path", "learning_rate", "num_train_epochs", "max_steps", "seed",
)  # fmt: skip


def facts_of(run: TrainingRun) -> dict[str, Any]:
    """Return the configuration of a run, and the environment in which it runs."""
    environment = {
        **package_versions(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": usable_cores(),
        "device": run.config.get("device"),
        "ranks": int(os.environ.get("PADDLE_TRAINERS_NUM") or 1),
        **{name: value for name, value in rounding_settings().items() if value},
    }
    steps = {"first_step": run.first_step, "total_steps": run.total_steps}
    return {"config": redacted(dict(run.config)), "environment": environment | steps}


def training_figures(record: Record) -> dict[str, float]:
    """Return the figures of a log, as `train/loss`."""
    return _figures("train", record)


def evaluation_figures(record: Record) -> dict[str, float]:
    """Return the figures of an evaluation, as `eval/loss`; those of one file of several as `eval/NAME/loss`."""
    figures = _figures("eval", record)
    for source, own in (record.get("eval_sources") or {}).items():
        figures |= _figures(f"eval/{redacted(str(source))}", own)
    return figures


def _figures(group: str, record: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{group}/{name.removeprefix('eval_')}": float(value)
        for name, value in record.items()
        if name not in _PROGRESS and isinstance(value, (int, float)) and math.isfinite(value)
    }


def samples_of(output_dir: Path, record: Record) -> list[dict[str, str]]:
    """Return what the model has answered, or spoken, in this evaluation: question, answer, expected, scores, sound.

    "sound" is the path of a recording; other values are texts. [] where no answers were asked for.
    """
    if not record.get("eval_answers"):
        return []
    try:
        with open(output_dir / SAMPLES_FILE, encoding="utf-8") as lines:
            return [_sample(json.loads(line)) for line in islice(lines, SAMPLES)]
    except (OSError, ValueError):
        return []


def _sample(line: Mapping[str, Any]) -> dict[str, str]:
    messages = line.get("messages") or [{}]
    texts = {
        "place": str(line.get("place", "")),
        "question": str(messages[-1].get("content") or ""),
        "answer": str(line.get("answer", "")),
        "expected": str(line.get("expected", "")),
        "scores": ", ".join(f"{name} {value:.3g}" for name, value in line.items() if isinstance(value, float)),
    }
    sample = {name: redacted(text)[:LONGEST] for name, text in texts.items()}
    sound = str(line.get("sound", ""))
    return sample | ({"sound": sound} if sound and os.path.isfile(sound) else {})


def table_of(samples: list[dict[str, str]]) -> str:
    """Return samples as text in Markdown, for trackers that have no tables."""
    blocks = []
    for sample in samples:
        shown = [f"**{name}**: {text}" for name, text in sample.items() if text and name not in ("place", "sound")]
        blocks.append("\n\n".join([f"`{sample['place']}`", *shown]))
    return "\n\n---\n\n".join(blocks)


def picture_of(output_dir: Path) -> str | None:
    """Return the path of the run's curve, where it was drawn."""
    path = output_dir / LOSS_CURVE_FILE
    return str(path) if path.is_file() else None


def card_of(run: TrainingRun, result: TrainResult) -> dict[str, Any]:
    """Return what a model card says of the run: what was trained on what, and how well it went."""
    parameters = {name: run.config[name] for name in _CARD_PARAMETERS if run.config.get(name) not in (None, "", [], ())}
    evaluation = result.evaluation.record() if result.evaluation is not None else {}
    results = {**result.record(), **evaluation}
    finite = {
        name: value for name, value in results.items() if not (isinstance(value, float) and not math.isfinite(value))
    }
    return redacted({"name": run.name, "parameters": parameters, "results": finite})
