"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.training.callbacks import Callback, Record, TrainingRun

logger = logging.getLogger(__name__)

# How figures are written for people. An evaluation's have the same labels as those of training.

# record name without `eval_` -> (label, format), in the order of display
_SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "perplexity": ("perplexity", "{:.4g}"),
    "token_accuracy": ("accuracy", "{:.1%}"),
    "code_accuracy": ("code accuracy", "{:.1%}"),
    "text_accuracy": ("text accuracy", "{:.1%}"),
    "reward": ("reward", "{:.4g}"),
    "reward_accuracy": ("reward accuracy", "{:.1%}"),
    "reward_margin": ("margin", "{:.3g}"),
    "exact_match": ("exact match", "{:.1%}"),
    "rougeL": ("rougeL", "{:.3f}"),
    "bleu": ("BLEU", "{:.1f}"),
    "wer": ("WER", "{:.1%}"),
    "cer": ("CER", "{:.1%}"),
    "learning_rate": ("lr", "{:.3g}"),
    "audio_learning_rate": ("audio lr", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "audio_seconds_per_second": ("audio s/s", "{:,.1f}"),
}
# shown in a second line
_DETAILS = {
    "reward_chosen": ("reward chosen", "{:.3g}"),
    "reward_rejected": ("rejected", "{:.3g}"),
    "logps_chosen": ("logp chosen", "{:.4g}"),
    "logps_rejected": ("rejected", "{:.4g}"),
    "kl_to_reference": ("KL", "{:.3g}"),
    "substitutions": ("substitutions", "{:.1%}"),
    "deletions": ("deletions", "{:.1%}"),
    "insertions": ("insertions", "{:.1%}"),
    "preference_loss": ("preference loss", "{:.4f}"),
    "sft_loss": ("SFT loss", "{:.4f}"),
}
_NOT_SHOWN = {
    "step", "epoch", "tokens", "batches", "batches_available", "units", "seconds", "sources", "rouge1", "rouge2",
    "answers", "reference_words",
}  # fmt: skip


def format_metrics(record: Mapping[str, Any]) -> str:
    """Return the main figures of a record in one line."""
    return _line(record, _SHOWN)


def format_details(record: Mapping[str, Any]) -> str:
    """Return its further figures in one line, those of an objective that this module does not know last, by name; ""
    if there are none."""
    values = _short_names(record)
    unknown = {name: (name.replace("_", " "), _form(name)) for name in values if name not in _SHOWN | _DETAILS}
    return _line(record, _DETAILS | unknown)


def _form(name: str) -> str:
    return "{:.1%}" if "accuracy" in name.split("_") else "{:.4g}"


def _line(record: Mapping[str, Any], labels: Mapping[str, tuple[str, str]]) -> str:
    values = _short_names(record)
    return "  ".join(f"{label} {form.format(values[name])}" for name, (label, form) in labels.items() if name in values)


def _short_names(record: Mapping[str, Any]) -> dict[str, Any]:
    names = {name: name.removeprefix("eval_") for name in record}
    return {short: record[name] for name, short in names.items() if short not in _NOT_SHOWN}


def evaluation_lines(record: Mapping[str, Any]) -> str:
    """Return the text for an evaluation, with how much of the data it covered."""
    covered = f"{record['eval_batches']} of {record['eval_batches_available']} batches"
    main = f"evaluation at step {record['step']}  {format_metrics(record)}"
    return f"{main}  ({covered}, {record['eval_seconds']:.1f} s){_details_below(record)}"


def log_lines(record: Mapping[str, Any], total_steps: int, eta: str = "") -> str:
    """Return the text for the mean figures of the steps since the last log."""
    return f"step {record['step']}/{total_steps}  {format_metrics(record)}{eta}{_details_below(record)}"


def _details_below(record: Mapping[str, Any]) -> str:
    details = format_details(record)
    return f"\n  {details}" if details else ""


def duration(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class PlainLines(Callback):
    """One log line for every log, evaluation and checkpoint."""

    def __init__(self) -> None:
        self._first = self._total = 0
        self._started = 0.0

    def on_train_begin(self, run: TrainingRun) -> None:
        self._first, self._total, self._started = run.first_step, run.total_steps, time.perf_counter()

    def on_log(self, record: Record) -> None:
        step = record["step"]
        per_step = (time.perf_counter() - self._started) / max(1, step - self._first)
        eta = duration(per_step * (self._total - step))
        logger.info(log_lines(record, self._total, f"  ETA {eta}"))

    def on_evaluate(self, record: Record) -> None:
        logger.info(evaluation_lines(record))

    def on_save(self, folder: Path) -> None:
        logger.info(f"saved {folder}")
