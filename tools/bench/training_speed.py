"""Training tokens per second of this project and of its peers, in turn, on the same model and documents.

    tools/bench/peers/make.sh .peers                       # once: the peers' virtual environments
    python tools/bench/training_speed.py [--models tiny small medium moe] [--lengths 1024 4096 8192]
        [--stages sft lora dpo] [--peers torch torch-bf16 trl paddleformers erniekit] [--rounds 3] [--threads 2]
        [--busy 0] [--write]

Every side makes whole steps: batch, forward, backward, clipping to norm 1, AdamW. Each peer is a process of its own
that takes turns with ours, so that a busy machine slows both; the ratio is that of the same round, its median and
range. Only useful tokens count, not padding (of pairs: each prompt once). torch runs as the fastest loop that we know
of, packed (documents told apart by position ids) and padded (grouped by length); the faster of the two is shown. Where
both sides have the same weights and documents, their first losses must agree. A peer in bfloat16 stands beside ours
with `bf16: true`, which computes in float32 where the processor is faster in it. The rates of products with these
threads, of both libraries, are recorded, because a ratio depends on them. `--busy N` keeps N further
processes multiplying, which makes products slower. `--write` puts table, plot and figures into docs/; cells that are
not measured again stay, each with its commit and date.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import training_report
import workload
from product_rates import busy, in_words, product_rates
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
    loss_tolerance: float = 2e-3  # of the first losses, where it packs: the same weights and documents as ours
    dtype: str = "float32"


DENSE_MODELS = ("tiny", "small", "medium")
BOTH_WAYS = (("--batching", "packed"), ("--batching", "padded"))
IN_16_BITS = ("--dtype", "bfloat16")
PEERS = {
    "torch": Side("torch", "torch_loop.py", BOTH_WAYS),
    # its weights are in 16 bits, so a loss of 9 may differ by 0.05
    "torch-bf16": Side(
        "torch", "torch_loop.py", tuple((*way, *IN_16_BITS) for way in BOTH_WAYS), loss_tolerance=0.05, dtype="bfloat16"
    ),
    "trl": Side("torch", "trl_trainer.py", stages=("sft", "lora", "dpo")),
    "trl-bf16": Side(
        "torch", "trl_trainer.py", (IN_16_BITS,), stages=("dpo",), loss_tolerance=float("inf"), dtype="bfloat16"
    ),
    "paddleformers": Side(
        "paddleformers",
        "paddle_suite.py",
        stages=("sft", "lora", "dpo"),
        models=DENSE_MODELS,
        loss_tolerance=float("inf"),
    ),
    "erniekit": Side("erniekit", "paddle_suite.py", models=DENSE_MODELS, loss_tolerance=float("inf")),
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

    ours = {dtype: start(sys.executable, "ours.py", ("--dtype", dtype)) for dtype in _dtypes(stage, model, args.peers)}
    expected = {dtype: worker.run(steps=2)["losses"] for dtype, worker in ours.items()}
    own: dict[str, list[dict[str, Any]]] = {dtype: [] for dtype in ours}
    peers: dict[str, Any] = {}
    for name in args.peers:
        side = PEERS[name]
        if stage not in side.stages or model not in side.models:
            continue
        for variant in side.variants:
            worker = start(args.environments / side.environment / "bin/python", side.script, variant)
            try:
                mine, theirs, first = turns(ours[side.dtype], worker, args.rounds, steps)
            except SideEndedError as ended:
                print(f"{name} {' '.join(variant)} could not run {model}, {stage}, {length}:\n{ended}", file=sys.stderr)
                peers.setdefault(name, {"failed": str(ended).strip().splitlines()[-1][:200]})
                continue
            finally:
                worker.close()
            if "padded" not in variant and not np.allclose(first, expected[side.dtype], atol=side.loss_tolerance):
                raise SystemExit(
                    f"{name} and we disagree on the loss of {model}, {stage}: {first}, {expected[side.dtype]}"
                )
            ratios = [rate(a) / rate(b) for a, b in zip(mine, theirs, strict=True)]
            figures = {
                "tokens_per_second": statistics.median(map(rate, theirs)),
                "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
                "peak_mb": theirs[-1]["peak_mb"],
                "how": "padded" if "padded" in variant else "packed",
            }
            own[side.dtype] += mine
            best = peers.get(name)
            if best is None or "failed" in best or figures["tokens_per_second"] > best["tokens_per_second"]:
                peers[name] = figures
    figures = {}
    for dtype, worker in ours.items():
        answers = own[dtype] or [worker.run(steps=steps) for _ in range(args.rounds)]
        worker.close()
        figures[dtype] = {"tokens_per_second": statistics.median(map(rate, answers)), "peak_mb": answers[-1]["peak_mb"]}
    return {
        "ours": figures["float32"],
        "ours, bfloat16": figures.get("bfloat16"),
        "peers": peers,
        "rounds": args.rounds,
    }


def _dtypes(stage: str, model: str, peers: Sequence[str]) -> list[str]:
    """The precisions in which ours has to run: float32, and those of the peers that can run a cell."""
    runnable = (PEERS[name] for name in peers if stage in PEERS[name].stages and model in PEERS[name].models)
    return list(dict.fromkeys(("float32", *(side.dtype for side in runnable))))


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
    parser.add_argument("--busy", type=int, default=0, help="further processes that multiply meanwhile")
    parser.add_argument("--turn-tokens", type=int, default=8192, help="about how many tokens a turn works on")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md, its figures and its plot")
    args = parser.parse_args()
    for model, stage, length in cells(args):
        with tempfile.TemporaryDirectory() as temporary, busy(args.busy):
            make_model(Path(temporary), workload.MODELS[model])
            rates = {"paddle": product_rates(sys.executable, "paddle", (args.threads,))}
            torch = args.environments / "torch/bin/python"
            if torch.exists():
                rates["torch"] = product_rates(torch, "torch", (args.threads,))
            figures = measure(model, length, stage, Path(temporary), args)
        figures |= {
            "product_rates": {library: of[str(args.threads)] for library, of in rates.items()},
            "busy": args.busy,
        }
        cell = training_report.Cell(model, stage, length, args.threads, args.busy)
        print(training_report.row(cell, figures))
        print("; ".join(f"{library}: {in_words(of)}" for library, of in rates.items()), flush=True)
        if args.write:
            training_report.record(cell, figures, args.environments)
    if args.write:
        training_report.write()


if __name__ == "__main__":
    main()
