"""Peak memory of whole training runs at 125 M parameters, what `erniekit validate` estimates, and the peers' peaks.

    tools/bench/peers/make.sh .peers                       # once: the peers' virtual environments
    python tools/bench/peak_memory.py [STAGE ...] [--lengths 4096 1024] [--environments .peers] [--threads 2] [--write]

Ours is the whole command, from reading data on; the peers are started as in `training_speed.py`. Every side is a
process of its own and makes `--steps` updates; its figure is the peak of resident memory, libraries included. torch
runs packed and padded; the smaller peak is shown. What a peer does not run, or is not installed for, is "-", and so is
every peer beyond `--peers-up-to` tokens a step, where `training_speed.py` tells the peaks of its loops.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import whole_run
import workload
from marked import BENCHMARKS, ROOT, measured_at, with_table
from workers import SideEndedError, Worker, make_model

SIDES = Path(__file__).resolve().parent / "sides"
MODEL = workload.MODELS["medium"]
ADAPTERS = {"lora": True, "lora_rank": workload.LORA_RANK}
# name -> our parameters, the stage of the peers' sides
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "SFT": ({}, "sft"),
    "LoRA": (ADAPTERS, "lora"),
    "wint8 LoRA": (ADAPTERS | {"weight_quantize_algo": "weight_only_int8"}, "wint8"),
    "DPO": ({"stage": "DPO"}, "dpo"),
    "DPO, `reference_model: copy`": ({"stage": "DPO", "reference_model": "copy"}, "dpo"),
}
# title -> environment, script, stages, further arguments of which the best counts
PEERS: dict[str, tuple[str, str, tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "transformers + peft": (
        "torch",
        "torch_loop.py",
        ("sft", "lora", "wint8"),
        (("--batching", "packed"), ("--batching", "padded")),
    ),
    "trl": ("torch", "trl_trainer.py", ("sft", "lora", "dpo"), ((),)),
    "paddleformers": ("paddleformers", "paddle_suite.py", ("sft", "lora"), ((),)),
    "erniekit 1.0.1": ("erniekit", "paddle_suite.py", ("sft", "lora"), ((),)),
}


def digits(count: int, draw: random.Random) -> str:
    """A text of so many tokens: the shipped tokenizer has one for each digit."""
    return "".join(draw.choices("0123456789", k=max(1, count)))


def write_data(stage: str, length: int, path: Path) -> None:
    """Documents, or pairs, of the lengths that the peers get, less what a template adds."""
    draw = random.Random(1)
    lines: list[dict[str, Any]] = []
    for step in range(8):
        if stage == "DPO":
            for prompt, chosen, rejected in workload.pairs(length, step, MODEL["vocab_size"]):
                answers = [[digits(len(answer) - 4, draw)] for answer in (chosen, rejected)]
                lines.append({"src": [digits(len(prompt) - 8, draw)], "tgt": [], "response": answers, "sort": [1, 0]})
            continue
        for document in workload.pack(length, step, MODEL["vocab_size"]):
            cut = int(len(document) * workload.PROMPT_SHARE)
            source, target = digits(cut - 6, draw), digits(len(document) - cut - 6, draw)
            lines.append({"src": [source], "tgt": [target]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def ours(name: str, length: int, args: argparse.Namespace) -> tuple[int, int]:
    """Bytes that a run takes, and that `erniekit validate --data` estimates."""
    own = STAGES[name][0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        values = whole_run.BASE | {
            "stage": "SFT",
            "model_name_or_path": str(whole_run.write_model(MODEL, folder)),
            "train_dataset_path": str(folder / "data.jsonl"),
            "output_dir": str(folder / "out"),
            "data_cache_dir": str(folder / "cache"),
            "max_seq_len": length,
            "max_steps": args.steps,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "use_fused_head_and_loss_fn": True,
            **own,
        }
        write_data(values["stage"], length, Path(values["train_dataset_path"]))
        peaks = whole_run.run(values, folder, threads=args.threads)
        return peaks.process, whole_run.estimated(values)["process"]


def theirs(title: str, stage: str, length: int, args: argparse.Namespace) -> int | None:
    """Bytes of a peer; None where it does not run the stage, or is not installed."""
    environment, script, stages, variants = PEERS[title]
    python = args.environments / environment / "bin/python"
    if stage not in stages or not python.exists() or length > args.peers_up_to:
        return None
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as temporary:
        make_model(Path(temporary), MODEL)
        for variant in variants:
            command = [str(python), str(SIDES / script), "--folder", temporary, "--stage", stage]
            worker = Worker([*command, "--length", str(length), "--threads", str(args.threads), *variant], args.threads)
            try:
                peaks.append(int(worker.run(steps=args.steps)["peak_mb"] * 2**20))
            except SideEndedError as ended:
                print(f"{title} could not run {stage}, {length}:\n{ended}", file=sys.stderr)
            finally:
                worker.close()
    return min(peaks, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 1024], help="tokens a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--peers-up-to", type=int, default=1024, help="tokens a step; some take minutes for a longer one"
    )
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    titles = ["run", "tokens a step", "measured, MB", "`validate`, MB", "error", *(f"{title}, MB" for title in PEERS)]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    print("\n".join(lines))
    for length in args.lengths:
        for name in args.stages or STAGES:
            measured, estimated = ours(name, length, args)
            cells = [name, f"{length:,}", f"{measured / 1e6:,.0f}", f"{estimated / 1e6:,.0f}"]
            cells.append(f"{estimated / measured - 1:+.0%}")
            for title in PEERS:
                peak = theirs(title, STAGES[name][1], length, args)
                cells.append("-" if peak is None else f"{peak / 1e6:,.0f} ({peak / measured:.2f} x)")
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if args.write:
        command = "python tools/bench/peak_memory.py --write"
        table = "\n".join([*lines, "", measured_at(command)])
        BENCHMARKS.write_text(with_table("peak-memory", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
