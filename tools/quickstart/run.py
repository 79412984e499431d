"""`make quickstart`: what a tiny ERNIE answers before and after it is trained on the shipped data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "examples/configs/quickstart/sft.yaml"
MODEL = "examples/models/tiny-ernie"
TRAINED = "output/quickstart/sft"
SCORE = "tools/quickstart/score.py"
PROMPTS = (
    "What is 27 + 15?",
    "Sort 7, 2, 9, 4 in descending order.",
    "Today is Friday, 12 June. What is tomorrow?",
    "Convert 35 km to m.",
)


def run(title: str, *command: str) -> None:
    """Show a command and run it; the quickstart ends where one fails."""
    print(f"\n== {title}\n$ {' '.join(_quoted(word) for word in command)}", flush=True)
    program = {"erniekit": [sys.executable, "-m", "erniekit"], "python": [sys.executable]}[command[0]]
    code = subprocess.run([*program, *command[1:]], check=False).returncode
    if code:
        sys.exit(code)


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def main() -> None:
    start = time.monotonic()
    os.chdir(ROOT)
    run("Before: random weights", "python", SCORE, MODEL, "--random")
    run("Train", "erniekit", "train", CONFIG)
    run("After", "python", SCORE, TRAINED)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run("Ask it", "erniekit", "generate", TRAINED, "--temperature", "0", *prompts)
    binaries = Path(sys.executable).parent
    shown = binaries.relative_to(ROOT) if binaries.is_relative_to(ROOT) else binaries
    print(f"\nDone in {time.monotonic() - start:.0f} s. Talk to it: {shown}/erniekit chat {TRAINED} --temperature 0")


if __name__ == "__main__":
    main()
