"""What a rank needs beside training while a checkpoint is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

# Twelve matrices of 26 MB, smaller ones, and the moments of all.
MODEL = {
    "model_type": "ernie4_5", "vocab_size": 512, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 4,
    "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
LARGEST = 4 * MODEL["hidden_size"] * MODEL["intermediate_size"]  # type: ignore[operator]


def train(parameters: dict[str, Any]) -> dict[str, int]:
    """A run that saves a checkpoint after its last step.

    Returns:
        The most bytes that this rank held while saving, beyond what it held before, and those of its tensors.
    """
    from erniekit.config import Config
    from erniekit.runners.train import run_training
    from erniekit.training import saving

    save, seen = saving.save_checkpoint, {}

    def watched(*arguments: Any, **named: Any) -> Any:
        named["ranks"].all_gather_object("")  # what ranks still send each other of the step has arrived
        with open("/proc/self/clear_refs", "w") as file:  # the peak starts anew
            file.write("5")
        before = _status("VmRSS")
        saved = save(*arguments, **named)
        seen["beside"] = _status("VmHWM") - before
        seen["tensors"] = sum(4 * int(parameter.size) for parameter in named["parameters"].values())
        return saved

    with patch.object(saving, "save_checkpoint", watched):
        run_training(Config.from_mapping(parameters, verb="train"))
    return seen


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
