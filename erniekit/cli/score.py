"""`erniekit score MODEL DATA`: let a reward model score the answers of a data file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from erniekit.config.values import DEVICE
from erniekit.environment import import_paddle


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="erniekit score",
        description="Let a reward model, which stage RM trains, score the answers of a data file. Each line of the "
        "output is a JSON object with the line of the record and its scores: `score` of a dialogue's last answer, "
        "`chosen` and `rejected` of a pair.",
        epilog="Example: erniekit score output/quickstart/rm examples/data/preference-eval.jsonl --output scores.jsonl",
    )
    parser.add_argument("model", type=Path, help="folder of a reward model: an output_dir or a checkpoint of stage RM")
    parser.add_argument("data", type=Path, help="file of dialogues, pairs of answers, or answers with a verdict")
    parser.add_argument("--output", type=Path, help="JSONL file to write, a new one; without it, lines are printed")
    parser.add_argument("--device", type=_device, default="auto", help="auto, cpu, gpu or gpu:N (default auto)")
    options = parser.parse_args(arguments)
    import_paddle()
    from erniekit.model.device import use_device
    from erniekit.runners.score import score_file

    use_device(options.device)
    score_file(options.model, options.data, options.output)
    return 0


def _device(text: str) -> str:
    """Return the name of a device. Raises argparse.ArgumentTypeError where there is no such name."""
    name: str = DEVICE.read(text)
    if not re.fullmatch(DEVICE.schema["pattern"], name):
        raise argparse.ArgumentTypeError(f"expected {DEVICE.expected}, got {text}")
    return name
