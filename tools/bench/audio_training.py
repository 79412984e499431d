"""Seconds of sound per second of training and of transcription, beside transformers' Qwen2-Audio on torch.

    tools/bench/peers/make.sh .peers torch                 # once: the peer's virtual environment
    python tools/bench/audio_training.py [--models tiny small] [--tasks train transcribe] [--rounds 3] [--steps 4]
        [--threads 2] [--environments .peers] [--write]

Both sides read the same wav files, make features, and train all weights with AdamW in float32, or write 24 tokens for
each recording with greedy decoding; a thread makes the next batch while the model works. Each side is a process of its
own that takes turns with the other; the ratio is that of the same round, its median and range. The first losses, and
the tokens that are written, must agree. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import audio_workload as workload
import numpy as np
from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from workers import Worker, make_model

SIDES = Path(__file__).resolve().parent / "sides"
RECORDINGS = 64
HEADER = """\
| model | task | ours, s of sound/s | transformers, s of sound/s | ratio | peak MB, ours / theirs |
|---|---|---:|---:|---|---|"""


def measure(model: str, task: str, folder: Path, options: argparse.Namespace) -> str:
    """A row of the table."""
    python = options.environments / "torch" / "bin" / "python"

    def start(program: Path | str, script: str) -> Worker:
        batch = workload.BATCH[model] if task == "train" else options.answers
        settings = ["--folder", str(folder), "--task", task, "--batch", str(batch), "--threads", str(options.threads)]
        return Worker([str(program), str(SIDES / script), *settings], options.threads)

    ours, theirs = start(sys.executable, "audio_ours.py"), start(python, "audio_torch.py")
    warm = [side.run(steps=2)["losses"] for side in (ours, theirs)]
    if not np.allclose(*warm, atol=2e-3):
        raise SystemExit(f"{model}, {task}: the sides disagree: {warm}")
    rounds = [(ours.run(steps=options.steps), theirs.run(steps=options.steps)) for _ in range(options.rounds)]
    for side in (ours, theirs):
        side.close()
    rates = [[answer["tokens"] / workload.RATE / answer["seconds"] for answer in pair] for pair in rounds]
    ratios = [mine / other for mine, other in rates]
    medians = [statistics.median(side) for side in zip(*rates, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    peaks = " / ".join(f"{answer['peak_mb']:,.0f}" for answer in rounds[-1])
    return f"| {model} | {task} | {medians[0]:,.1f} | {medians[1]:,.1f} | {spread} | {peaks} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(workload.BATCH), default=list(workload.BATCH))
    parser.add_argument("--tasks", nargs="+", choices=("train", "transcribe"), default=["train", "transcribe"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--answers", type=int, default=16, help="recordings that are transcribed at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    rows = [HEADER]
    for model in options.models:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_model(folder, workload.config_of(model))
            workload.write_folder(model, folder)
            workload.write_recordings(model, folder, RECORDINGS)
            for task in options.tasks:
                rows.append(measure(model, task, folder, options))
                print(rows[-1], flush=True)
    versions = versions_in(options.environments / "torch/bin/python", "torch", "transformers")
    below = measured_at(f"python tools/bench/audio_training.py --threads {options.threads}", versions)
    table = "\n".join([*rows, "", below])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("audio", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
