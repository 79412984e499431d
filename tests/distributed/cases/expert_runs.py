"""Whole runs with experts, as `erniekit train` does them on each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.log_capture import captured_log


def train(parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs one after the other; what each has said on this rank, its losses, and the bytes it has sent."""
    from erniekit.config import Config
    from erniekit.distributed.cpu_backend import bytes_sent
    from erniekit.runners.train import run_training

    results = []
    for values in parameters:
        before = sum(bytes_sent().values())
        with captured_log() as said:
            run_training(Config.from_mapping(values, verb="train"))
        log = (Path(values["output_dir"]) / "training_log.jsonl").read_text(encoding="utf-8")
        records = [json.loads(line) for line in log.splitlines()]
        losses = [record[name] for record in records for name in ("loss", "eval_loss") if name in record]
        results.append({"said": "\n".join(said), "losses": losses, "sent": sum(bytes_sent().values()) - before})
    return results
