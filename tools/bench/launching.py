"""Start-up of a run on several ranks: seconds from the command to the first optimizer step, and what they consist of.

    python tools/bench/launching.py [--repeats 3]

Prints a Markdown table: the best of some runs of one step of the quickstart's model, its data tokenised before. "ready"
is when the launcher has read the configuration and found the data; "ranks" when rank 0 says its first word, with Paddle
imported; "joined" when the groups have formed; "step 1" when the model is made and the first step is done; "end" when
the command has ended, with the model saved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import counted

CONFIG = "examples/configs/quickstart/sft.yaml"
WORDS = ("max_steps=1", "warmup_steps=0", "do_eval=false", "save_strategy=no", "report_to=none", "disable_tqdm=true")
SIGNS = {"ready": "ranks (", "ranks": "device: ", "joined": " records, ", "step 1": "step 1/1"}
PADDLES = ("-m", "paddle.distributed.launch", "--log_level", "ERROR", "--nproc_per_node", "2")


def starts() -> dict[str, list[str]]:
    """Title of a row -> the words after `python`."""
    ours = ["-m", "erniekit", "train", CONFIG, *WORDS]
    rows = {"one process": ours} | {f"`--nproc {count}`": [*ours, "--nproc", str(count)] for count in (2, 4)}
    return rows | {"2 ranks, `paddle.distributed.launch`": [*PADDLES, "erniekit/__main__.py", *ours[2:]]}


def seconds(words: list[str], output: str) -> dict[str, float]:
    """When each sign was seen, from the start of the command on."""
    started = time.perf_counter()
    logs = ["--log_dir", f"{output}/paddle"] if words[1] == PADDLES[1] else []
    process = subprocess.Popen(
        [sys.executable, *words[:2], *logs, *words[2:], f"output_dir={output}/run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    seen: dict[str, float] = {}
    for line in process.stdout:
        for name, sign in SIGNS.items():
            if sign in line:
                seen.setdefault(name, time.perf_counter() - started)
    if process.wait():
        sys.exit(f"python {' '.join(words)} failed with status {process.returncode}")
    return seen | {"end": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    columns = [*SIGNS, "end"]
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for title, words in starts().items():
        runs = []
        for _ in counted(range(repeats), title):
            with tempfile.TemporaryDirectory() as output:
                Path(output, "paddle").mkdir()
                runs.append(seconds(words, output))
        best = min(runs, key=lambda run: run["end"])
        cells = [f"{best[name]:.1f}" if name in best else "" for name in columns]
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
