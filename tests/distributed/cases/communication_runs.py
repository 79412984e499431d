"""Whole runs, as `erniekit train` does them on each rank, and what a rank has held and sent in each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch


def train(parameters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs of one layout, one after the other.

    Returns:
        Of each run: its losses, the values of parameters that this rank `held`, the most values that entered a layer
        (`entered`), and the bytes that this rank has `sent`.
    """
    from erniekit.config import Config
    from erniekit.distributed.cpu_backend import bytes_sent
    from erniekit.model.decoder_layer import DecoderLayer
    from erniekit.runners import train as runner

    forward, open_model = DecoderLayer.forward, runner.open_model
    seen: dict[str, int] = {}

    def watched_forward(layer: Any, x: Any, *rest: Any, **named: Any) -> Any:
        seen["entered"] = max(seen.get("entered", 0), int(x.size))
        return forward(layer, x, *rest, **named)

    def watched_model(*arguments: Any, **named: Any) -> Any:
        model = open_model(*arguments, **named)
        seen["held"] = sum(int(parameter.size) for parameter in model.parameters())
        return model

    results = []
    with patch.object(DecoderLayer, "forward", watched_forward), patch.object(runner, "open_model", watched_model):
        for values in parameters:
            seen.clear()
            before = sum(bytes_sent().values())
            runner.run_training(Config.from_mapping(values, verb="train"))
            log = (Path(values["output_dir"]) / "training_log.jsonl").read_text(encoding="utf-8")
            losses = [json.loads(line)["loss"] for line in log.splitlines()]
            results.append({**seen, "losses": losses, "sent": sum(bytes_sent().values()) - before})
    return results
