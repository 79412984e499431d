"""How steady the quickstart is: its exact match over seeds and numbers of threads, with the seconds of training.

    python tools/bench/steadiness.py [--seeds 42 1 2 3 4] [--threads 1 2 4] [--write] [NAME=VALUE ...]

Trains examples/configs/quickstart/sft.yaml anew for each, without evaluation, and scores the held-out file. Rounding
differs between processors and numbers of threads, so a schedule is good only if every run is. Parameters given by name
are tried in place of the file's. `--write` puts each row into docs/benchmarks.md once it is measured; rows of other
numbers of threads stay, if their seeds are the same.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

from marked import BENCHMARKS, ROOT, measured_at, table_of, with_table

CONFIG = "examples/configs/quickstart/sft.yaml"
QUIET = ("do_eval=false", "report_to=none", "save_strategy=no", "logging_steps=1000")


def run(seed: int, threads: int, changes: list[str]) -> tuple[float, float]:
    """Train and score; return the exact match in percent and the seconds of the training process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        train = [sys.executable, "-m", "erniekit", "train", CONFIG, *QUIET, *changes]
        start = time.perf_counter()
        _said([*train, f"seed={seed}", f"output_dir={folder}/model"], environment)
        seconds = time.perf_counter() - start
        said = _said([sys.executable, "tools/quickstart/score.py", f"{folder}/model"], environment)
    found = re.search(r"exact match on \S+: ([\d.]+)%", said)
    if found is None:
        raise SystemExit(said)
    return float(found[1]), seconds


def _said(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 1, 2, 3, 4])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE", help="parameters other than the file's")
    arguments = parser.parse_args()
    heading = (
        "| threads | " + " | ".join(f"seed {seed}" for seed in arguments.seeds) + " | seconds of a run |\n"
        "|---:|" + "---:|" * len(arguments.seeds) + "---|"
    )
    print(heading, flush=True)
    for threads in arguments.threads:
        runs = [run(seed, threads, arguments.changes) for seed in arguments.seeds]
        seconds = [taken for _, taken in runs]
        cells = " | ".join(f"{matched:.1f}%" for matched, _ in runs)
        row = f"| {threads} | {cells} | {min(seconds):.0f} to {max(seconds):.0f} |"
        print(row, flush=True)
        if arguments.write:
            write(heading, threads, row)


def write(heading: str, threads: int, row: str) -> None:
    """Put a row into the document's table, beside those of other numbers of threads with the same seeds."""
    table = table_of("steadiness", BENCHMARKS)
    rows = {}
    if table.startswith(heading):
        rows = {int(line.split("|")[1]): line for line in table[len(heading) :].splitlines() if line.startswith("|")}
    rows[threads] = row
    measured = measured_at("python tools/bench/steadiness.py --write", [f"{os.cpu_count()} cores"])
    text = "\n".join([heading, *(rows[number] for number in sorted(rows)), "", measured])
    BENCHMARKS.write_text(with_table("steadiness", text, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
