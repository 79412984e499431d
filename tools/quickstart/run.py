"""The quickstart: what a tiny ERNIE answers before and after it is trained on the shipped data. Called by `make quickstart`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path("examples/configs/quickstart/sft.yaml")
MODEL = Path("examples/models/tiny-ernie")
TRAINED = Path("output/quickstart/sft")
PROMPTS = (
    "What is 27 + 15?",
    "Sort 7, 2, 9, 4 in descending order.",
    "Today is Friday, 28 February. What is tomorrow?",
    "Convert 35 km to m.",
)


def run(title: str, *command: str) -> None:
    """Show a command and run it; the quickstart ends where one fails."""
    print(f"\n== {title}\n$ {' '.join(_quoted(word) for word in command)}", flush=True)
    executable = {"erniekit": [sys.executable, "-m", "erniekit"], "python": [sys.executable]}[command[0]]
    code = subprocess.run([*executable, *command[1:]], check=False).returncode
    if code:
        sys.exit(code)


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def main() -> None:
    start = time.monotonic()
    score = str(Path(__file__).with_name("score.py"))
    score = str(Path(score).relative_to(Path.cwd())) if Path(score).is_relative_to(Path.cwd()) else score
    run("Before: random weights", "python", score, str(MODEL), "--random")
    run("Train", "erniekit", "train", str(CONFIG))
    run("After", "python", score, str(TRAINED))
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    run("Ask it", "erniekit", "generate", str(TRAINED), *prompts)
    print(f"\nDone in {time.monotonic() - start:.0f} s. Talk to it yourself: {VENV_HINT}erniekit chat {TRAINED}")


VENV_HINT = (
    f"{Path(sys.executable).parent.relative_to(Path.cwd())}/" if Path(sys.executable).is_relative_to(Path.cwd()) else ""
)

if __name__ == "__main__":
    main()
