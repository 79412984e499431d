"""Attention: forward and backward by our kernel, beside Paddle's operators, a dense mask and torch; time and memory.

    python tools/bench/attention.py [--lengths 1024 2048 4096 8192 16384] [--masks document "shared question"
        "full causal" "both ways"] [--heads "8 2 64"] [--other-heads "4 1 32" "12 4 64" "16 8 128"] [--rounds 3]
        [--threads 2] [--environments .peers] [--write]

One row of 8 query heads and 2 key heads of 64, float32: log-normal documents (mean 512 tokens); the same ones as
questions with two answers, half and a quarter each, that do not see each other; one document; the documents again, read
in both directions. Then documents of 4,096 tokens with other heads. Each way is a process of its own, and they take
turns. Output and gradients of a way must be ours before it is timed. torch's flex_attention has no backward pass on a
CPU, so it stands beside our forward pass. Then ours over 8,192 tokens of equal documents: all its times together are
fitted by a * tokens + b * pairs of a query and a key that it sees (half the sum of squared document lengths). The
product rates of the run are printed below.
`--write` puts table and plot into docs/.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from attention_case import MASKS, Heads, samples, visible_pairs
from marked import BENCHMARKS, measured_at, with_table
from plots import new_plot, save_plot
from product_rates import in_words, product_rates
from workers import ROOT, SideEndedError, Worker

SIDES = Path(__file__).resolve().parent / "sides"
OTHER_TOKENS, OTHER_HEADS = 4096, ("4 1 32", "12 4 64", "16 8 128")
SWEEP_TOKENS, SWEEP = 8192, (64, 128, 256, 512, 1024, 2048, 4096)
TURN_SECONDS, SLOW_SECONDS = 0.4, 4.0  # a turn takes at least the first; a call above the second is made twice only
TOLERANCE = 2e-5  # of the largest number


@dataclass(frozen=True)
class Way:
    """One way to compute a case; `beside` is ours that it is compared with."""

    script: str
    how: str
    beside: str = "ours"
    backward: bool = True
    longest: int = 1 << 20


WAYS = {
    "ours": Way("paddle_attention.py", "native"),
    "Paddle's operators": Way("paddle_attention.py", "documents"),
    "dense mask": Way("paddle_attention.py", "dense", longest=8192),
    "torch, dense mask": Way("torch_attention.py", "mask"),
    "torch, by documents": Way("torch_attention.py", "documents"),
    "ours, forward": Way("paddle_attention.py", "native", "ours, forward", backward=False),
    "Paddle's operators, forward": Way("paddle_attention.py", "documents", "ours, forward", backward=False),
    "flex_attention, forward": Way("torch_attention.py", "flex", "ours, forward", backward=False),
}
Figures = dict[str, dict[str, Any]]  # by way: `ms`, `peak` in MB, `ratios` of time to what it is beside, one a round


def ways_of(mask: str, length: int, torch: Path | None) -> list[str]:
    """Those that can run; one document is one causal call in torch either way."""
    return [
        name
        for name, way in WAYS.items()
        if length <= way.longest
        and (torch or "torch" not in way.script)
        and not (mask == "full causal" and way.how == "mask")
    ]


def compare(name: str, answers: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for array, other in zip(answers, expected, strict=True):
        error = float(np.abs(array - other).max() / np.abs(other).max())
        if not error < TOLERANCE:
            raise SystemExit(f"{name} and ours differ by {error:.1e} of the largest number")


def measure(
    mask: str, length: int, heads: Heads, names: list[str], torch: Path | None, rounds: int, threads: int
) -> Figures:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: dict[str, Worker] = {}
        calls, own, figures, expected = {}, {}, Figures(), {}
        for number, name in enumerate(names):
            way = WAYS[name]
            python = str(torch) if "torch" in way.script else sys.executable
            command = [python, str(SIDES / way.script), "--mask", mask, "--length", str(length), "--way", way.how]
            command += [
                "--heads",
                str(heads),
                "--answers",
                str(folder / f"{number}.npz"),
                *["--backward"] * way.backward,
            ]
            workers[name] = Worker(command, threads)
            stack.callback(workers[name].close)

        def seconds_of(name: str, steps: int) -> float | None:
            """None where the side has ended, as dense masks do when memory runs out."""
            try:
                return float(workers[name].run(steps=steps)["seconds"])
            except SideEndedError as ended:
                print(f"{name} has ended at {mask}, {length}: {ended}", file=sys.stderr)
                figures.pop(name, None)
                return None

        for number, name in enumerate(workers):
            if seconds_of(name, 0) is None:  # answers after the first call
                continue
            with np.load(folder / f"{number}.npz") as saved:
                answers = [saved[key] for key in saved.files if key != "peak"]
                figures[name] = {"peak": float(saved["peak"]), "seconds": []}
            compare(name, answers, expected.setdefault(WAYS[name].beside, answers))
        for name in list(figures):
            if (seconds := seconds_of(name, 1)) is None:
                continue
            calls[name] = max(1, round(TURN_SECONDS / seconds))
            own[name] = 2 if seconds > SLOW_SECONDS else rounds
        for number in range(rounds):
            for name in list(figures):
                if number < own[name] and (seconds := seconds_of(name, calls[name])) is not None:
                    figures[name]["seconds"].append(seconds / calls[name])
    for name, found in figures.items():
        ours = figures[WAYS[name].beside]["seconds"]
        found["ratios"] = [b / a for a, b in zip(ours, found["seconds"])]  # noqa: B905 -- the slow have fewer
        found["ms"] = statistics.median(found["seconds"]) * 1e3
    return figures


def fit(tokens: np.ndarray, pairs: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a and b of times = a * tokens + b * pairs that make relative errors smallest, and these errors."""
    parts = np.stack([tokens, pairs], 1)
    costs = np.linalg.lstsq(parts / times[:, None], np.ones(len(times)), rcond=None)[0]
    return costs, parts @ costs / times - 1


def cell(found: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if found is None:
        return "-"
    ratios = found["ratios"]
    memory = found["peak"] / max(ours["peak"], 1)
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) / {memory:.1f}"


def row(mask: str, length: int, heads: Heads, figures: Figures) -> str:
    cells = [mask, f"{length:,}", str(len(samples(mask, length))), str(heads)]
    for name, way in WAYS.items():
        found = figures.get(name)
        is_ours = name == way.beside and found is not None
        cells.append(f"{found['ms']:,.0f} / {found['peak']:,.0f}" if is_ours else cell(found, figures[way.beside]))
    return "| " + " | ".join(cells) + " |"


HEADER = (
    f"| mask | tokens | documents | heads | {' | '.join(WAYS)} |\n".replace("ours |", "ours, ms / MB |", 1)
    + f"|---|---:|---:|---:|{'|'.join('---:' if name == way.beside else '---' for name, way in WAYS.items())}|"
)


def plot(cases: dict[tuple[str, int], Figures], points: dict[str, list[tuple[int, int, float]]], costs: Any) -> str:
    figure, axes = new_plot(rows=2, columns=2, width=9, height=7)
    for axis, mask in zip(axes.flat, MASKS[:3]):  # noqa: B905 -- the last axis is another
        for number, name in enumerate(WAYS):
            line = [(n, found[name]["ms"]) for (m, n), found in cases.items() if m == mask and name in found]
            if line:
                style = {"linestyle": "--" if "forward" in name else "-", "linewidth": 2.5 if "ours" in name else 1.2}
                axis.loglog(*zip(*line), marker="o", markersize=3, label=name, color=f"C{number}", **style)  # noqa: B905 -- pairs
        axis.set(title=mask, xlabel="tokens", ylabel="ms")
        axis.set_xticks([n for m, n in cases if m == mask], [f"{n >> 10}K" for m, n in cases if m == mask], minor=False)
        axis.minorticks_off()
    axes[0, 0].legend(fontsize=7)
    last = axes[1, 1]
    for kind, line in points.items():
        tokens, pairs, times = np.array(line).T
        last.loglog(pairs, times, "o", markersize=4, label=kind)
    tokens, pairs, _ = np.array([point for line in points.values() for point in line]).T
    last.loglog(pairs, costs[0] * tokens + costs[1] * pairs, "k_", markersize=9, label="fitted")
    last.set(title="ours: its time follows the pairs", xlabel="pairs of a query and a key it sees", ylabel="ms")
    last.legend(fontsize=7)
    return save_plot(figure, "attention")


def fitted(points: dict[str, list[tuple[int, int, float]]]) -> tuple[np.ndarray, str]:
    tokens, pairs, times = np.array([point for line in points.values() for point in line]).T
    costs, errors = fit(tokens, pairs, times)
    sizes = np.abs(errors)
    return costs, (
        f"Our {len(times)} times, from {pairs.min():,.0f} to {pairs.max():,.0f} visible pairs of a query and a key, "
        f"are {costs[0] * 1e3:.2f} us a token and {costs[1] * 1e6:.2f} ns a pair, with errors of "
        f"{np.median(sizes):.0%} (median) and {sizes.max():.0%} (largest)."
    )


def torch_version(python: Path) -> str:
    program = "import torch; print('torch', torch.__version__)"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--heads", type=Heads.of, default=Heads(), help="query heads, key heads and head size")
    parser.add_argument("--other-heads", type=Heads.of, nargs="*", default=[Heads.of(text) for text in OTHER_HEADS])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md and its plot")
    args = parser.parse_args()
    torch = args.environments / "torch/bin/python"
    if not torch.exists():
        torch = None
    cases: dict[tuple[str, int], Figures] = {}
    points: dict[str, list[tuple[int, int, float]]] = {}
    lines = [HEADER]
    print(HEADER, flush=True)
    for mask in args.masks:
        for length in args.lengths:
            names = ways_of(mask, length, torch)
            figures = measure(mask, length, args.heads, names, torch, args.rounds, args.threads)
            cases[mask, length] = figures
            pairs = visible_pairs(samples(mask, length))
            points.setdefault(mask, []).append((length, pairs, figures["ours"]["ms"]))
            lines.append(row(mask, length, args.heads, figures))
            print(lines[-1], flush=True)
    for heads in args.other_heads:
        names = ways_of("document", OTHER_TOKENS, torch)
        figures = measure("document", OTHER_TOKENS, heads, names, torch, args.rounds, args.threads)
        lines.append(row("document", OTHER_TOKENS, heads, figures))
        print(lines[-1], flush=True)
    for size in SWEEP:
        mask = f"equal {size}"
        figures = measure(mask, SWEEP_TOKENS, args.heads, ["ours"], None, args.rounds, args.threads)
        pairs = visible_pairs(samples(mask, SWEEP_TOKENS))
        points.setdefault(f"equal documents, {SWEEP_TOKENS:,} tokens", []).append(
            (SWEEP_TOKENS, pairs, figures["ours"]["ms"])
        )
    costs, sentence = fitted(points)
    print(sentence)
    rates = [f"paddle {in_words(product_rates(sys.executable, 'paddle'))}"]
    rates += [f"torch {in_words(product_rates(torch, 'torch'))}"] if torch else []
    measured = f"{args.threads} threads, {args.rounds} rounds. Product rates after them: {'; '.join(rates)}."
    print(measured)
    if args.write:
        others = [torch_version(torch)] if torch else []
        below = measured_at("python tools/bench/attention.py --write", others)
        image = f"![Time against tokens, by mask; ours against visible pairs]({plot(cases, points, costs)})"
        lines += ["", sentence, f"{measured} {below}", "", image]
        BENCHMARKS.write_text(with_table("attention", "\n".join(lines), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
