"""A roofline: how near the kernels of a training step come to what processor and memory can do.

    python tools/bench/roofline.py [--models tiny medium] [--length 4096] [--threads 2] [--rounds 5] [--write]

The roofs are measured in the same rounds: the best float32 product, and NumPy's c = a + b on as many threads, in
memory and in the cache. Kernels run forward and backward on the pack of a benchmark, alone; bytes are the least that
has to move, so a kernel whose operands stay in the cache may lie above memory's roof. Prints a Markdown table;
`--write` puts it and a plot into docs/.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from marked import BENCHMARKS, measured_at, with_table
from plots import new_plot, save_plot
from workers import Worker

SIDE = Path(__file__).resolve().parent / "sides/kernel_rates.py"


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of a model: the best rates of the machine; of each kernel its work, its bytes and the median of its seconds."""
    command = [sys.executable, str(SIDE), "--model", model, "--length", str(args.length)]
    worker = Worker(command, args.threads)
    rounds = [worker.run() for _ in range(args.rounds)]
    worker.close()
    machine = {name: max(found["machine"][name] for found in rounds) for name in rounds[0]["machine"]}
    kernels = {}
    for number, (name, flops, size, _) in enumerate(rounds[0]["kernels"]):
        kernels[name] = flops, size, statistics.median(found["kernels"][number][3] for found in rounds)
    return {"machine": machine, "kernels": kernels}


def rows(model: str, found: dict[str, Any]) -> list[str]:
    machine, lines = found["machine"], []
    for name, (flops, size, seconds) in found["kernels"].items():
        rate, intensity = flops / seconds / 1e9, flops / size
        roof = min(machine["product"], intensity * machine["memory"])
        bound = "processor" if roof == machine["product"] else "memory"
        lines.append(
            f"| {model} | {name} | {seconds * 1e3:,.1f} | {intensity:,.1f} | {rate:,.1f} | {size / seconds / 1e9:,.1f} "
            f"| {bound} | {rate / roof:.0%} |"
        )
    return lines


HEADER = "| model | kernel | ms | flops a byte | GF/s | GB/s | roof | of it |\n|---|---|---:|---:|---:|---:|---|---:|"


def plot(results: dict[str, dict[str, Any]]) -> str:
    figure, axis = new_plot(width=8, height=5)
    machine = {
        name: max(found["machine"][name] for found in results.values()) for name in ("product", "memory", "cache")
    }
    for name, style in (("memory", "-"), ("cache", ":")):
        ends = [0.1, machine["product"] / machine[name], 10000]
        line = [min(machine["product"], intensity * machine[name]) for intensity in ends]
        axis.loglog(ends, line, style, color="black", linewidth=1.2, label=f"{name}: {machine[name]:.0f} GB/s")
    axis.annotate(f"best product: {machine['product']:.0f} GF/s", (10000, machine["product"]), ha="right", va="bottom")
    for number, (model, found) in enumerate(results.items()):
        for name, (flops, size, seconds) in found["kernels"].items():
            point = flops / size, flops / seconds / 1e9
            axis.loglog(*point, "os^D"[number], color=f"C{number}", markersize=6, label=None)
            axis.annotate(name, point, xytext=(4, -9 if number else 4), textcoords="offset points", fontsize=7)
        axis.plot([], [], "os^D"[number], color=f"C{number}", label=model)
    axis.set(xlabel="floating-point operations a byte that has to move", ylabel="GF/s", ylim=(0.5, None))
    axis.legend(loc="lower right", fontsize=8)
    return save_plot(figure, "roofline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "small", "medium"), default=["tiny", "medium"])
    parser.add_argument("--length", type=int, default=4096, help="tokens a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md and its plot")
    args = parser.parse_args()
    results, lines = {}, [HEADER]
    for model in args.models:
        results[model] = measure(model, args)
        lines += rows(model, results[model])
    roofs = "; ".join(
        f"beside {model} {found['machine']['product']:,.0f} GF/s, {found['machine']['memory']:,.0f} GB/s in memory, "
        f"{found['machine']['cache']:,.0f} in the cache"
        for model, found in results.items()
    )
    lines += ["", f"Roofs: {roofs}."]
    print("\n".join(lines))
    if args.write:
        own = f" --threads {args.threads}" if args.threads != 2 else ""
        below = measured_at(f"python tools/bench/roofline.py{own} --write")
        lines.append(f"{args.length:,} tokens, {args.threads} threads, median of {args.rounds} rounds. {below}")
        lines += ["", f"![Roofline of the kernels of a training step]({plot(results)})"]
        BENCHMARKS.write_text(with_table("roofline", "\n".join(lines), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
