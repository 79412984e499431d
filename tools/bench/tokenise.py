"""Reading and tokenising a large file: seconds and peak memory, cold and from the cache, and planning two epochs.

    python tools/bench/tokenise.py [--samples 1000000] [--threads 2] [--model examples/models/tiny-ernie]

The file holds the quickstart's records over and over, no two alike. Each measurement is a process of its own, so that
its peak is its own. Prints a markdown table. A million samples take about 1 GB in the folder for temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
RECORDS = ROOT / "examples/data/sft-train.jsonl"
PARTS = ("tokenise", "open from the cache", "plan two epochs")


def write_samples(path: Path, samples: int) -> None:
    """The shipped records over and over, each time with another number in the question."""
    records = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    with open(path, "w", encoding="utf-8") as file:
        for number in range(samples):
            record = records[number % len(records)]
            questions = [f"{number}. {question}" for question in record["src"]]
            file.write(json.dumps({**record, "src": questions}) + "\n")


def work(part: str, model: Path, path: Path, cache: Path) -> None:
    """Do one part and print its figures."""
    from erniekit.data.dataset import open_dataset
    from erniekit.data.plan import StepPlan
    from erniekit.data.sources import Source
    from erniekit.data.template import chat_template
    from erniekit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    template = chat_template(tokenizer)
    started = time.perf_counter()
    dataset = open_dataset(
        [Source(path, "erniekit", 1.0)], tokenizer, template, max_seq_len=2048, over_length="drop", cache_dir=cache
    )
    if part == "plan two epochs":
        started = time.perf_counter()
        plan = StepPlan(
            dataset, max_seq_len=2048, packing=True, greedy=True, window=500, batch_size=1, accumulation=1, seed=1,
            shuffle=True, strategy="concat",
        )  # fmt: skip
        plan.total_steps(-1, 2)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak, "tokens": int(dataset.lengths.sum())}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2, help="of the tokenizers library")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/models/tiny-ernie")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        part, path, cache = options.work
        work(part, options.model, Path(path), Path(cache))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        write_samples(path, options.samples)
        print(f"{options.samples:,} samples, {path.stat().st_size / 1e6:,.0f} MB, {options.threads} threads\n")
        print("| | seconds | tokens | peak MB |\n|---|---:|---:|---:|")
        for part in PARTS:
            command = [sys.executable, __file__, "--model", str(options.model), "--work", part, str(path), folder]
            environment = {**os.environ, "RAYON_NUM_THREADS": str(options.threads)}
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            figures = json.loads(run.stdout.splitlines()[-1])
            print(
                f"| {part} | {figures['seconds']:.1f} | {figures['tokens']:,} | {figures['peak_mb']:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
