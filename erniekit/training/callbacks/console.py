"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.training.callbacks import Callback, Record, TrainingRun

logger = logging.getLogger(__name__)

# How figures are written for people.

# record name -> (label, format), in the order of display
_SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "token_accuracy": ("accuracy", "{:.1%}"),
    "learning_rate": ("lr", "{:.3g}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "eval_loss": ("loss", "{:.4f}"),
    "eval_perplexity": ("perplexity", "{:.4g}"),
    "eval_token_accuracy": ("accuracy", "{:.1%}"),
    "eval_exact_match": ("exact match", "{:.1%}"),
    "eval_rougeL": ("rougeL", "{:.3f}"),
    "eval_bleu": ("BLEU", "{:.1f}"),
    "reward_accuracy": ("reward accuracy", "{:.1%}"),
    "reward_margin": ("margin", "{:.3g}"),
    "eval_reward_accuracy": ("reward accuracy", "{:.1%}"),
    "eval_reward_margin": ("margin", "{:.3g}"),
}
_NOT_SHOWN = {
    "step", "epoch", "eval_batches", "eval_batches_available", "eval_units", "eval_seconds", "eval_sources",
    "eval_rouge1", "eval_rouge2", "eval_answers",
}  # fmt: skip


def format_metrics(record: Mapping[str, Any]) -> str:
    """The figures of a record in one line; those of an objective that this module does not know come last, by name."""
    known = [f"{label} {shape.format(record[name])}" for name, (label, shape) in _SHOWN.items() if name in record]
    others = [f"{name} {value:.4g}" for name, value in record.items() if name not in _SHOWN and name not in _NOT_SHOWN]
    return "  ".join(known + others)


def evaluation_line(record: Mapping[str, Any]) -> str:
    """One line for an evaluation, with how much of the data it covered."""
    covered = f"{record['eval_batches']} of {record['eval_batches_available']} batches"
    return f"evaluation at step {record['step']}  {format_metrics(record)}  ({covered}, {record['eval_seconds']:.1f} s)"


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
        logger.info(f"step {step}/{self._total}  {format_metrics(record)}  ETA {eta}")

    def on_evaluate(self, record: Record) -> None:
        logger.info(evaluation_line(record))

    def on_save(self, folder: Path) -> None:
        logger.info(f"saved {folder}")
