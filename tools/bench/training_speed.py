"""Training tokens per second of this project and of its peers, in turn, on the same model and documents.

    tools/bench/peers/make.sh .peers                       # once: the peers' virtual environments
    python tools/bench/training_speed.py [--models tiny small medium moe] [--lengths 1024 4096 8192]
        [--stages sft lora dpo] [--peers torch torch-bf16 trl paddleformers erniekit] [--rounds 3] [--threads 2]
        [--write]

Every side makes whole steps: batch, forward, backward, clipping to norm 1, AdamW. Each peer is a process of its own
that takes turns with ours, so that a busy machine slows both; the ratio is that of the same round, its median and
range. Only useful tokens count, not padding (of pairs: each prompt once). torch runs as the fastest loop that we know
of, packed (documents told apart by position ids) and padded (grouped by length); the faster of the two is shown. Where
both sides have the same weights and documents, their first losses must agree. `--write` puts table, plot and figures
into docs/; cells that are not measured again stay, each with its commit and date.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import training_report
import workload
from workers import ROOT, SideEndedError, Worker, make_model

SIDES = Path(__file__).resolve().parent / "sides"


@dataclass(frozen=True)
class Side:
    """How a peer is started, and what it can do."""

    environment: str
    script: str
    variants: tuple[tuple[str, ...], ...] = ((),)  # further arguments; the fastest counts
    stages: tuple[str, ...] = ("sft", "lora")
    models: tuple[str, ...] = tuple(workload.MODELS)
    same_start: bool = True  # the same weights and documents as ours, where it packs


DENSE_MODELS = ("tiny", "small", "medium")
BOTH_WAYS = (("--batching", "packed"), ("--batching", "padded"))
IN_16_BITS = ("--dtype", "bfloat16")
PEERS = {
    "torch": Side("torch", "torch_loop.py", BOTH_WAYS),
    "torch-bf16": Side("torch", "torch_loop.py", tuple((*way, *IN_16_BITS) for way in BOTH_WAYS), same_start=False),
    "trl": Side("torch", "trl_trainer.py", stages=("sft", "lora", "dpo")),
    "trl-bf16": Side("torch", "trl_trainer.py", (IN_16_BITS,), stages=("dpo",), same_start=False),
    "paddleformers": Side(
        "paddleformers", "paddle_suite.py", stages=("sft", "lora", "dpo"), models=DENSE_MODELS, same_start=False
    ),
    "erniekit": Side("erniekit", "paddle_suite.py", models=DENSE_MODELS, same_start=False),
}


def turns(
    ours: Worker, theirs: Worker, rounds: int, steps: int, warm_up: int = 2
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[float]]:
    """A warm-up turn of each, then answers of both, a turn a round; and the losses of the peer's first turn."""
    first = theirs.run(steps=warm_up)["losses"]
    answers = [(ours.run(steps=steps), theirs.run(steps=steps)) for _ in range(rounds)]
    return [pair[0] for pair in answers], [pair[1] for pair in answers], first


def rate(answer: dict[str, Any]) -> float:
    return answer["tokens"] / answer["seconds"]


def measure(model: str, length: int, stage: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One cell: our rate and peak, and those of every peer with the ratios to ours."""
    steps = max(1, args.turn_tokens // length)

    def start(python: Path | str, script: str, more: tuple[str, ...] = ()) -> Worker:
        command = [str(python), str(SIDES / script), "--folder", str(folder), "--stage", stage]
        return Worker([*command, "--length", str(length), "--threads", str(args.threads), *more], args.threads)

    ours = start(sys.executable, "ours.py")
    expected = ours.run(steps=2)["losses"]
    own: list[dict[str, Any]] = []
    peers: dict[str, Any] = {}
    for name in args.peers:
        side = PEERS[name]
        if stage not in side.stages or model not in side.models:
            continue
        for variant in side.variants:
            worker = start(args.environments / side.environment / "bin/python", side.script, variant)
            try:
                mine, theirs, first = turns(ours, worker, args.rounds, steps)
            except SideEndedError as ended:
                print(f"{name} {' '.join(variant)} could not run {model}, {stage}, {length}:\n{ended}", file=sys.stderr)
                peers.setdefault(name, {"failed": str(ended).strip().splitlines()[-1][:200]})
                continue
            finally:
                worker.close()
            if side.same_start and "padded" not in variant and not np.allclose(first, expected, atol=2e-3):
                raise SystemExit(f"{name} and we disagree on the loss of {model}, {stage}: {first}, {expected}")
            ratios = [rate(a) / rate(b) for a, b in zip(mine, theirs, strict=True)]
            figures = {
                "tokens_per_second": statistics.median(map(rate, theirs)),
                "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
                "peak_mb": theirs[-1]["peak_mb"],
                "how": "padded" if "padded" in variant else "packed",
            }
            own += mine
            best = peers.get(name)
            if best is None or "failed" in best or figures["tokens_per_second"] > best["tokens_per_second"]:
                peers[name] = figures
    if not own:
        own = [ours.run(steps=steps) for _ in range(args.rounds)]
    ours.close()
    figures = {"tokens_per_second": statistics.median(map(rate, own)), "peak_mb": own[-1]["peak_mb"]}
    return {"ours": figures, "peers": peers, "threads": args.threads, "rounds": args.rounds}


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Model, stage, length of every cell that is asked for; experts are compared in supervised training only."""
    for model in args.models:
        for stage in args.stages:
            if model == "moe" and stage != "sft":
                continue
            for length in args.lengths:
                yield model, stage, length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=workload.MODELS, default=list(workload.MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 8192], help="tokens a step")
    parser.add_argument("--stages", nargs="+", choices=("sft", "lora", "dpo"), default=["sft", "lora", "dpo"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=8192, help="about how many tokens a turn works on")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md, its figures and its plot")
    args = parser.parse_args()
    for model, stage, length in cells(args):
        with tempfile.TemporaryDirectory() as temporary:
            make_model(Path(temporary), workload.MODELS[model])
            figures = measure(model, length, stage, Path(temporary), args)
        cell = training_report.Cell(model, stage, length)
        print(training_report.row(cell, figures), flush=True)
        if args.write:
            training_report.record(cell, figures, args.environments)
    if args.write:
        training_report.write()


if __name__ == "__main__":
    main()
