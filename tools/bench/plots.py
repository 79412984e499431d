"""Plots for docs/: the same figures give the same file, so that only what moved shows in a commit."""

from __future__ import annotations

from typing import Any

from marked import BENCHMARKS

FOLDER = BENCHMARKS.parent / "benchmarks"


def new_plot(*, rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.0) -> tuple[Any, Any]:
    """A figure of matplotlib and its axes, inches."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), layout="constrained")


def save_plot(figure: Any, name: str) -> str:
    """Write docs/benchmarks/NAME.svg; the Markdown path from docs/benchmarks.md."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = name
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return str(path.relative_to(BENCHMARKS.parent))
