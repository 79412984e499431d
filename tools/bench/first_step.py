"""`train` from the command to its first step, part by part, beside the peers.

    tools/bench/peers/make.sh .peers           # once; peers that are not there are left out
    python tools/bench/first_step.py [--rounds 3] [--threads 2] [--write]

Ours is the quickstart's configuration, once with an empty data cache and once with what that run has left there; so is
trl's with the cache of `datasets`. Sides take turns, each run is a process of its own that ends after the first step,
and none evaluates; a round before them is not counted. The peers get the shapes of the quickstart's model with random
weights and as many samples: trl the same dialogues with the same tokenizer, as prompts and completions, the Paddle
suites, which need a SentencePiece vocabulary, words of one token each, as many as ours has tokens. The files are in the
page cache for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table

SIDES = Path(__file__).resolve().parent / "sides"
CONFIG, DATA = "examples/configs/quickstart/sft.yaml", ROOT / "examples/data/sft-train.jsonl"
MODEL = ROOT / "examples/models/tiny-ernie"
PARTS = ("imports", "configuration", "data", "model", "first step")
MERGED = "configuration, data and model"  # of suites that do not tell them apart
WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstvz"]  # those of sides/paddle_suite.py
COMMAND = "python tools/bench/first_step.py --write"


@dataclass(frozen=True)
class Side:
    name: str
    python: Path
    script: str
    cold: bool | None = None  # None: it keeps no cache


@dataclass(frozen=True)
class Run:
    """Wall and processor seconds of every part."""

    wall: dict[str, float]
    cpu: dict[str, float]


def prepare(folder: Path) -> None:
    """The dialogues as prompts and completions, and as words; the model of trl."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    names = itertools.cycle(WORDS)

    def in_words(text: str) -> str:
        return " ".join(next(names) for _ in tokenizer.encode(text).ids)

    with open(folder / "records.jsonl", "w") as records, open(folder / "words.jsonl", "w") as words:
        for line in DATA.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            system = f"{record['system']}\n" if record.get("system") else ""
            exchanges = [f"User: {q}\nAssistant: {a}" for q, a in zip(record["src"], record["tgt"], strict=True)]
            text = "<|begin_of_sentence|>" + system + "<|end_of_sentence|>".join(exchanges)
            answer = record["tgt"][-1]
            records.write(json.dumps({"prompt": text.removesuffix(answer), "completion": answer}) + "\n")
            own = {name: [in_words(text) for text in record[name]] for name in ("src", "tgt")}
            words.write(json.dumps(own) + "\n")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())


def run(side: Side, folder: Path, cache: Path, threads: int) -> Run:
    """One start of a side; its parts are what lies between the marks that it prints."""
    with tempfile.TemporaryDirectory(dir=folder) as output:
        words = [str(side.python), str(SIDES / side.script)]
        if side.script == "first_step_ours.py":
            words += [CONFIG, f"output_dir={output}", f"data_cache_dir={cache}", "do_eval=false"]
        else:
            words += ["--folder", str(folder), "--output", output, "--cache", str(cache), "--threads", str(threads)]
        left_out = (
            "PYTHONPATH",
            "PYTHONDONTWRITEBYTECODE",
        )  # ours keeps its compiled modules, as an installed one does
        own = {name: value for name, value in os.environ.items() if name not in left_out}
        environment = {
            **own, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "1",
            "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true",
        }  # fmt: skip
        start = time.monotonic()
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"^LOSS (.*)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{side.name} did not come to its first step:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    if abs(json.loads(found[1]) - math.log(512)) > 1:
        raise SystemExit(f"{side.name}: a loss of {found[1]} is not that of random weights and 512 tokens")
    wall: dict[str, float] = defaultdict(float)
    cpu: dict[str, float] = defaultdict(float)
    before, used = start, 0.0
    for part, now, processor in map(json.loads, re.findall(r"^MARK (.*)$", done.stdout, re.MULTILINE)):
        wall[part] += now - before
        cpu[part] += processor - used
        before, used = now, processor
    return Run(wall, cpu)


def median(runs: list[Run], kind: str, parts: tuple[str, ...]) -> float | None:
    """Seconds of these parts together; None where the side does not tell them."""
    if not any(part in getattr(one, kind) for one in runs for part in parts):
        return None
    return statistics.median(sum(getattr(one, kind).get(part, 0.0) for part in parts) for one in runs)


def row(side: Side, runs: list[Run], ours: list[Run]) -> str:
    cells = [side.name]
    for part in PARTS:
        seconds = median(runs, "wall", (part,))
        cells.append("-" if seconds is None else f"{seconds:.2f}")
    merged = median(runs, "wall", (MERGED,))
    if merged is not None:
        cells[2] = f"{merged:.2f} with data and model"
    every = (*PARTS, MERGED)
    totals = {kind: (median(runs, kind, every) or 0.0, median(ours, kind, every) or 1.0) for kind in ("wall", "cpu")}
    cells += [f"{own:.2f} | {own / mine:.1f}" for own, mine in totals.values()]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    python = {name: options.environments / name / "bin/python" for name in ("torch", "paddleformers", "erniekit")}
    sides = [
        Side("ours", Path(sys.executable), "first_step_ours.py", cold=True),
        Side("ours, from the data cache", Path(sys.executable), "first_step_ours.py", cold=False),
        Side("transformers + trl", python["torch"], "first_step_trl.py", cold=True),
        Side("transformers + trl, from the data cache", python["torch"], "first_step_trl.py", cold=False),
        Side("paddleformers-cli 1.2.0", python["paddleformers"], "first_step_paddle.py"),
        Side("erniekit 1.0.1", python["erniekit"], "first_step_paddle.py"),
    ]
    sides = [side for side in sides if side.python.exists()]
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        for side in sides:
            if side.script == "first_step_paddle.py":
                make = [str(side.python), str(SIDES / side.script), "--folder", str(folder)]
                subprocess.run(make, check=True, capture_output=True)
        for number in range(options.rounds + 1):  # the first is a warm-up
            for side in sides:
                cache = folder / f"cache-{number}-{side.script}"
                made = run(side, folder, cache, options.threads)
                if number:
                    runs[side.name].append(made)
                print(f"{side.name}: {sum(made.wall.values()):.2f} s", file=sys.stderr, flush=True)
    lines = [f"| seconds | {' | '.join(PARTS)} | together | x ours | CPU seconds | x ours |", "|---|" + "---:|" * 9]
    for side in sides:
        ours = runs["ours, from the data cache" if side.cold is False else "ours"]
        lines.append(row(side, runs[side.name], ours))
    print("\n".join(lines))
    if options.write:
        trl = versions_in(python["torch"], "torch", "transformers", "trl") if python["torch"].exists() else []
        caption = f"Medians of {options.rounds} rounds, {options.threads} threads. {measured_at(COMMAND, trl)}"
        BENCHMARKS.write_text(with_table("first-step", "\n".join([*lines, "", caption]), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
