"""Tokenising beside `datasets` + `transformers`: MB/s of one core, the start from a cold and a warm cache, memory.

    tools/bench/peers/make.sh .peers torch     # once; without it our own figures alone are shown
    python tools/bench/tokenise.py [--megabytes 20] [--rounds 3] [--write]
    python tools/bench/tokenise.py --memory 0.1 1 5 [--write]     # GB of JSONL; about 4 MB/s, and twice the disk

Both read the same JSONL, make the same dialogues and labels (50 samples are compared), and leave a cache: ours its
memory-mapped arrays, `datasets` its Arrow file. Theirs is `load_dataset` and a batched `map`, in which plain string
operations put the text together and the fast tokenizer gets a batch of it at once. One process, one tokenizer thread
(RAYON_NUM_THREADS=1), the same tokenizer.json. Imports are not counted. `short` are the quickstart's records over and
over, no two alike, `long` four questions answered by paragraphs of docs/, with a vocabulary of 16,000 made from them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from rounds import counted

SIDES = Path(__file__).resolve().parent / "sides"
TINY = ROOT / "examples/models/tiny-ernie"
COMMAND = "python tools/bench/tokenise.py"
Figures = dict[str, Any]


def short_records() -> Iterator[dict[str, Any]]:
    """The shipped records over and over, each time with another number in the question."""
    lines = (ROOT / "examples/data/sft-train.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(itertools.cycle(records)):
        yield {**record, "src": [f"{number}. {question}" for question in record["src"]]}


def paragraphs() -> list[str]:
    """Of the project's documentation, but for those that may name control tokens."""
    pages = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    return [part for page in pages for text in page.split("\n\n") if (part := text.strip()) and "<" not in part]


def long_records() -> Iterator[dict[str, Any]]:
    """Dialogues of four exchanges, about 8 KB each."""
    rng, texts = random.Random(0), paragraphs()
    for number in itertools.count():
        questions = [f"{number}.{turn} {rng.choice(texts)[:200].strip()}" for turn in range(4)]
        answers = ["\n\n".join(rng.choices(texts, k=3))[:2000].strip() for _ in questions]
        yield {"src": questions, "tgt": answers, "system": "Answer from the documentation."}


WORKLOADS = {"short": short_records, "long": long_records}


def write_records(path: Path, workload: str, size: float) -> None:
    """At least `size` bytes of them."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        for record in WORKLOADS[workload]():
            written += file.write(json.dumps(record) + "\n")
            if written >= size:
                return


def make_model(folder: Path, workload: str) -> None:
    """A tokenizer: the quickstart's, for long records with a vocabulary of its own."""
    import tokenizers

    folder.mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    if workload == "long":
        special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=16_000,
            special_tokens=special,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(paragraphs(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())


def run(python: Path | str, side: str, model: Path, path: Path, cache: Path, *more: str) -> Figures:
    """What a process of its own measures."""
    command = [str(python), str(SIDES / side), "--model", str(model), *more, str(path), str(cache)]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(workload: str, size: float, rounds: int, torch: Path | None) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, path = folder / "model", folder / "records.jsonl"
        make_model(model, workload)
        write_records(path, workload, size)
        megabytes = path.stat().st_size / 1e6
        sides = [(sys.executable, "tokenise_ours.py")] + ([(str(torch), "tokenise_datasets.py")] if torch else [])
        cold: list[list[Figures]] = [[] for _ in sides]
        warm: list[list[Figures]] = [[] for _ in sides]
        for number in counted(range(rounds), f"tokenising {workload}"):
            for side, (python, script) in enumerate(sides):
                cache = folder / f"cache-{side}-{number}"
                cold[side].append(run(python, script, model, path, cache))
                warm[side].append(run(python, script, model, path, cache))
            first = [figures[-1] for figures in (*cold, *warm)]
            if any((one["samples"], one["shown"]) != (first[0]["samples"], first[0]["shown"]) for one in first):
                raise SystemExit(f"the sides do not make the same samples of {workload} records")
    rates = [statistics.median(megabytes / one["cpu"] for one in own) for own in cold]
    seconds = [(_median(own, "seconds"), _median(again, "seconds")) for own, again in zip(cold, warm, strict=True)]
    peaks = [f"{_median(own, 'peak_mb'):.0f}" for own in cold]
    theirs = ["-"] * 5
    if torch:
        ratios = [b["cpu"] / a["cpu"] for a, b in zip(*cold, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        theirs = [f"{rates[1]:.2f}", ratio, f"{seconds[1][0]:.1f}", f"{seconds[1][1]:.2f}", peaks[1]]
    size_told = f"{megabytes:.0f} MB, {cold[0][0]['tokens'] / 1e6:.1f} M tokens"
    cells = [f"{workload}, {size_told}", f"{rates[0]:.2f}", *theirs[:2], f"{seconds[0][0]:.1f} / {theirs[2]}"]
    return _row([*cells, f"{seconds[0][1]:.2f} / {theirs[3]}", f"{peaks[0]} / {theirs[4]}"])


def _median(figures: list[Figures], name: str) -> float:
    return statistics.median(one[name] for one in figures)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def memory(gigabytes: float) -> str:
    """A row: peaks of tokenising a file, of opening it from the cache, and of planning two epochs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, path, cache = folder / "model", folder / "records.jsonl", folder / "cache"
        make_model(model, "long")
        write_records(path, "long", gigabytes * 1e9)
        runs = [run(sys.executable, "tokenise_ours.py", model, path, cache, *more) for more in ((), (), ("--plan",))]
    counts = [f"{gigabytes:g}", f"{runs[0]['samples']:,}", f"{runs[0]['tokens'] / 1e6:,.0f} M"]
    return _row([*counts, *(f"{one['peak_mb']:.0f}" for one in runs), f"{runs[1]['cpu']:.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--memory", nargs="+", type=float, metavar="GB", help="measure peak memory instead of time")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    others: list[str] = []
    if options.memory:
        name, command = "tokenising-memory", f"{COMMAND} --memory {' '.join(f'{size:g}' for size in options.memory)}"
        heads = ["GB of JSONL", "records", "tokens", "tokenise, peak MB", "open from the cache", "plan two epochs"]
        lines = [_row([*heads, "CPU seconds to open"]), "|" + "---:|" * 7]
        rows = (memory(size) for size in options.memory)
    else:
        torch = options.environments / "torch/bin/python"
        torch = torch if torch.exists() else None
        others = versions_in(torch, "datasets", "transformers", "tokenizers") if torch else []
        name, command = "tokenising", COMMAND
        heads = ["records", "ours, MB / CPU s", "`datasets` + `transformers`", "ratio (range)"]
        both = ["seconds, cold: ours / theirs", "seconds, warm", "peak MB"]
        lines = [_row([*heads, *both]), "|---|" + "---:|" * 6]
        rows = (compare(each, options.megabytes * 1e6, options.rounds, torch) for each in options.workloads)
    print("\n".join(lines))
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    if options.write:
        table = "\n".join([*lines, "", measured_at(command, others)])
        BENCHMARKS.write_text(with_table(name, table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
