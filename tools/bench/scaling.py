"""Speed of training on two ranks against one process, each with one thread, as ratios.

    python tools/bench/scaling.py [--hidden 512] [--layers 6] [--length 512] [--rounds 3] [--write]

A step takes the same global batch everywhere: eight rows of full length, float32. The variants take turns; a ratio is
that of the tokens per second of a variant to those of one process in the same round, without the first two steps.
Two ranks cannot be more than twice as fast. Prints a Markdown table with the median over the rounds and the range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.ranks import run_ranks
from tools.bench.communication import write_rows
from tools.bench.marked import ESTIMATES, with_table
from tools.parity.layout_run import ROOT, make_model, train
from tools.parity.layouts import ERNIE, LAYOUTS, MICRO_BATCHES, Layout

WARM_UP = 2  # steps
BY_NAME = {layout.name: layout for layout in (Layout("one process"), *LAYOUTS)}
SHOWN = ("one process", "dp2", "tp2", "tp2 + sp", "pp2", "sharding1 x 2", "sharding2 x 2", "sharding3 x 2")


def tokens_per_second(layout: Layout, parameters: dict[str, Any]) -> float:
    """Of all ranks together: the median of the steps after the first ones."""
    own = {"gradient_accumulation_steps": MICRO_BATCHES // layout.dp_world_size, **layout.parameters}
    said = run_ranks(train, layout.ranks, timeout=600, parameters={**parameters, **own}, precision="float32")
    if said[0]["refused"]:
        sys.exit(f"{layout.name}: {said[0]['refused']}")
    log = (Path(parameters["output_dir"]) / "training_log.jsonl").read_text(encoding="utf-8")
    return statistics.median(json.loads(line)["tokens_per_second"] for line in log.splitlines()[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row; a micro-batch is one row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", nargs="+", choices=BY_NAME, default=SHOWN, metavar="NAME", help=", ".join(SHOWN))
    parser.add_argument("--write", action="store_true", help=f"put the table into {ESTIMATES.relative_to(ROOT)}")
    args = parser.parse_args()
    names = ["one process", *(name for name in args.layouts if name != "one process")]
    settings = ERNIE | {
        "vocab_size": 8192,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
        "head_dim": args.hidden // ERNIE["num_attention_heads"],
    }
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "model", Path(folder) / "text.jsonl"
        run_ranks(make_model, 1, model_folder=str(model), settings=settings)
        write_rows(text, args.length)
        parameters = {
            "stage": "PT", "model_name_or_path": str(model), "continue_training": True,
            "train_dataset_path": str(text), "train_dataset_type": "text", "max_seq_len": args.length,
            "packing": False, "random_shuffle": False, "per_device_train_batch_size": 1, "max_steps": args.steps,
            "save_strategy": "no", "do_eval": False, "report_to": "none", "logging_steps": 1,
            "output_dir": str(Path(folder) / "run"), "overwrite_output_dir": True,
            "data_cache_dir": str(Path(folder) / "cache"),
        }  # fmt: skip
        for _ in range(args.rounds):
            for name in names:
                speeds[name].append(tokens_per_second(BY_NAME[name], parameters))
                print(f"{name}: {speeds[name][-1]:,.0f} tokens/s", file=sys.stderr, flush=True)
    table = ["| layout | tokens/s | times one process (range) |", "|---|---:|---|"]
    for name in names:
        ratios = [own / alone for own, alone in zip(speeds[name], speeds["one process"], strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        table.append(f"| {name} | {statistics.median(speeds[name]):,.0f} | {shown} |")
    print("\n".join(table))
    if args.write:
        ESTIMATES.write_text(with_table("scaling", "\n".join(table), ESTIMATES), encoding="utf-8")


if __name__ == "__main__":
    main()
