"""What `training_speed.py` has measured, as figures (JSON), a table and a plot in docs/.

python tools/bench/training_report.py    # makes table and plot anew from the figures
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from marked import BENCHMARKS, commit, today, with_table
from plots import FOLDER, new_plot, save_plot

FIGURES = FOLDER / "training.json"
PEERS = ("torch", "torch-bf16", "trl", "trl-bf16", "paddleformers", "erniekit")
NAMES = {
    "torch": "transformers (peft)",
    "torch-bf16": "the same, bfloat16",
    "trl": "trl",
    "trl-bf16": "trl, bfloat16",
    "paddleformers": "paddleformers-cli 1.2.0",
    "erniekit": "erniekit 1.0.1",
}
ORDER = {"tiny": 0, "small": 1, "medium": 2, "moe": 3, "sft": 0, "lora": 1, "dpo": 2}


class Cell(NamedTuple):
    """What is compared, with how many threads, beside how many other processes that multiply."""

    model: str
    stage: str
    length: int
    threads: int = 2
    busy: int = 0

    def __str__(self) -> str:
        threads = "" if self.threads == 2 else f", {self.threads} threads"
        return f"{self.model} {self.stage} {self.length}{threads}" + (f", {self.busy} busy" if self.busy else "")


def _entry(peer: Mapping[str, Any] | None) -> str:
    """The rate of a peer, and how many times as fast we were: median and range."""
    if peer is None:
        return "-"
    if "failed" in peer:
        return "failed"
    middle, low, high = peer["ratio"]
    how = ", padded" if peer["how"] == "padded" else ""
    return f"{peer['tokens_per_second']:,.0f}{how}: {middle:.2f} ({low:.2f}-{high:.2f})"


def row(cell: Cell, figures: Mapping[str, Any]) -> str:
    """A row of the table."""
    ours, peers = figures["ours"], figures["peers"]
    peaks = [f"{peers[name]['peak_mb']:,.0f}" for name in ("torch", "trl") if "peak_mb" in peers.get(name, {})]
    entries = " | ".join(_entry(peers.get(name)) for name in PEERS)
    threads = f"{cell.threads}" + (f", {cell.busy} busy" if cell.busy else "")
    rounded = figures.get("ours, bfloat16")
    speeds = [f"{each['tokens_per_second']:,.0f}" for each in (ours, rounded) if each]
    return (
        f"| {cell.model} | {cell.stage} | {cell.length:,} | {threads} | {_rates(figures)} | {', '.join(speeds)} "
        f"| {entries} | {ours['peak_mb']:,.0f} / {peaks[0] if peaks else '-'} |"
    )


def _rates(figures: Mapping[str, Any]) -> str:
    """The product rates of the run: float32 and bfloat16 through Paddle's libraries, then through torch."""
    of = figures.get("product_rates", {})
    return "; ".join(", ".join(f"{rate:,.0f}" for rate in rates.values()) for rates in of.values()) or "-"


def _version(environment: Path, package: str) -> str:
    program = f"from importlib.metadata import version; print(version({package!r}))"
    python = environment / "bin/python"
    if not python.exists():
        return "none"
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=False).stdout.strip()


def record(cell: Cell, figures: dict[str, Any], environments: Path) -> None:
    """Put a cell among the figures, with what was measured, where and when."""
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    versions = {name: _version(environments / "torch", name) for name in ("torch", "transformers", "trl", "peft")}
    versions |= {name: _version(environments / name, name) for name in ("paddleformers", "erniekit")}
    known[str(cell)] = {
        **cell._asdict(),
        **figures,
        "commit": commit(),
        "date": today(),
        "python": platform.python_version(),
        "versions": versions,
    }
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _cells() -> list[tuple[Cell, dict[str, Any]]]:
    known = json.loads(FIGURES.read_text(encoding="utf-8")).values()
    cells = [(Cell(**{name: entry[name] for name in Cell._fields if name in entry}), entry) for entry in known]
    return sorted(cells, key=lambda item: (ORDER[item[0].stage], ORDER[item[0].model], *item[0][2:]))


def table(image: str) -> str:
    """The plot, and all cells, with the commits and versions that they were measured at."""
    cells = _cells()
    head = " | ".join(NAMES[name] for name in PEERS)
    lines = [
        f"![how many times as fast as each peer]({image})",
        "",
        "| model | stage | tokens a step | threads | GF/s, float32 and bfloat16: Paddle's; torch's "
        f"| ours, tokens/s: float32, `bf16: true` | {head} | peak MB, ours / torch's |",
        "|---|---|---:|---|---|---:|" + "---|" * len(PEERS) + "---|",
        *(row(cell, figures) for cell, figures in cells),
        "",
    ]
    at = sorted({f"`{entry['commit']}` ({entry['date']})" for _, entry in cells})
    versions = cells[-1][1]["versions"]
    lines.append(
        f"Commit {', '.join(at)}; " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    )
    return "\n".join(lines)


def plot() -> str:
    """Where the plot is: how many times as fast we were as each peer, with the range over the rounds."""
    cells = _cells()
    figure, axes = new_plot(height=1.6 + 0.34 * len(cells))
    for number, name in enumerate(PEERS):
        points = [
            (x, figures["peers"][name]["ratio"])
            for x, (_, figures) in enumerate(cells)
            if "ratio" in figures["peers"].get(name, {})
        ]
        if not points:
            continue
        middles = [ratio[0] for _, ratio in points]
        spread = [[ratio[0] - ratio[1] for _, ratio in points], [ratio[2] - ratio[0] for _, ratio in points]]
        places = [x + (number - (len(PEERS) - 1) / 2) * 0.12 for x, _ in points]
        axes.errorbar(middles, places, xerr=spread, fmt="o", markersize=4, linewidth=1, label=NAMES[name])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(1.3, color="gray", linewidth=1, linestyle=":")
    axes.set_xscale("log")
    ticks = [0.5, 1, 1.3, 2, 3, 5, 8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(cells)), [str(cell) for cell, _ in cells])
    axes.invert_yaxis()
    axes.set_xlabel("useful tokens/s: ours over theirs")
    figure.legend(fontsize=8, loc="outside upper center", ncols=3)
    return save_plot(figure, "training")


def write() -> None:
    """Table and plot into docs/, from the figures."""
    BENCHMARKS.write_text(with_table("training", table(plot()), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    write()
