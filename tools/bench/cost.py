"""How time grows with tokens, documents, parameters, ranks, samples and the size of a checkpoint.

    python tools/bench/cost.py [--curves tokens documents parameters ranks planning saving resuming] [--rounds 3]
                               [--threads 2] [--folder FOLDER] [--write]

Every round of a curve is a process of its own that measures all its points, forwards and backwards in turn. A line is
fitted to the logarithms of every round: its slope is the exponent, 1 where time is proportional. Steps are those of
supervised training, batch and AdamW included, after one that is not counted; the best of three where all are of the
same documents. `--write` puts table and plot into docs/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import workload
from marked import BENCHMARKS, ROOT, measured_at, with_table
from plots import new_plot, save_plot
from rounds import counted

sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent / "sides")]

Point = tuple[float, float]  # what grows, seconds
DOCUMENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_TOKENS = 16384  # of all steps of a point, where steps have fewer
SHAPES = ((128, 2), (128, 8), (256, 4), (256, 16), (512, 4), (512, 16), (768, 12), (1024, 12))  # hidden size, layers


class Curve(NamedTuple):
    """Seconds of something against something that grows.

    Attributes:
        points: what `measure` is called with.
        expected: the exponent of cost without waste.
        fitted_from: points below are shown, not fitted.
    """

    title: str
    grows: str
    points: Sequence[Any]
    measure: Callable[[Any, Path], Point]
    expected: int = 1
    fitted_from: float = 0


def seconds_of(action: Callable[[], object], times: int = 1) -> float:
    """The best of some times."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best


def model(hidden: int, layers: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return workload.DENSE | shape | {"head_dim": hidden // workload.DENSE["num_attention_heads"]}


def step_seconds(config: dict[str, Any], length: int) -> float:
    """A step of `length` tokens, the mean of as many as have STEP_TOKENS."""
    import ours

    step, steps = ours.make_step(config, None, "sft", length), STEP_TOKENS // length
    step(steps)
    started = time.perf_counter()
    for number in range(steps):
        step(number)
    return (time.perf_counter() - started) / steps


def tokens(length: int, folder: Path) -> Point:
    return length, step_seconds(workload.MODELS["tiny"], length)


def documents(count: int, folder: Path, length: int = 4096) -> Point:
    import ours

    config = workload.MODELS["tiny"]
    _, advance = ours.make_parts(config, None, "sft", length)
    ids = np.random.default_rng(count).integers(3, config["vocab_size"], (count, length // count))
    advance(0, ours.packed(ids))
    return count, seconds_of(lambda: advance(1, ours.packed(ids)), 3)


def parameters(shape: tuple[int, int], folder: Path, length: int = 1024) -> Point:
    import ours

    config = model(*shape)
    step = ours.make_step(config, None, "sft", length)
    step(0)
    return ours.ModelConfig.from_json(config).parameter_count(), seconds_of(lambda: step(1), 3)


def ranks(count: int, folder: Path, length: int = 512, rows: int = 4) -> Point:
    """A step of which every rank takes as many rows, each rank with one thread."""
    from tests.distributed.ranks import run_ranks
    from tools.bench.communication import write_rows
    from tools.bench.scaling import tokens_per_second
    from tools.parity.layout_run import make_model
    from tools.parity.layouts import Layout

    model_folder, text = folder / "model", folder / "text.jsonl"
    if not text.exists():
        run_ranks(make_model, 1, model_folder=str(model_folder), settings=workload.MODELS["tiny"])
        write_rows(text, length)
    values = {
        "stage": "PT", "model_name_or_path": str(model_folder), "train_dataset_path": str(text),
        "train_dataset_type": "text", "max_seq_len": length, "packing": False, "random_shuffle": False,
        "per_device_train_batch_size": 1, "max_steps": 8, "save_strategy": "no", "do_eval": False,
        "report_to": "none", "logging_steps": 1, "output_dir": str(folder / "run"), "overwrite_output_dir": True,
        "data_cache_dir": str(folder / "cache"),
    }  # fmt: skip
    own = {"gradient_accumulation_steps": rows}
    rate = tokens_per_second(Layout(f"dp{count}", own, data=count), values)
    return count, rows * length * count / rate


class Lengths(NamedTuple):
    """As much of a dataset as a plan of steps needs."""

    lengths: np.ndarray
    source_of: np.ndarray
    probabilities: tuple[float, ...] = (1.0,)


def planning(samples: int, folder: Path) -> Point:
    """An epoch put in order and packed, as before the first step."""
    from erniekit.data.sampler import StepPlan

    drawn = np.random.default_rng(0).lognormal(np.log(400), 1.0, samples)
    data: Any = Lengths(np.clip(drawn, 1, 4096).astype(np.int64), np.zeros(samples, np.int32))

    def plan() -> None:
        StepPlan(
            data, max_seq_len=4096, packing=True, greedy=True, window=100_000, batch_size=1, accumulation=8,
            num_samples_each_epoch=samples,
        ).packs(0)  # fmt: skip

    return samples, seconds_of(plan, 3 if samples <= 10**6 else 1)


def saving(shape: tuple[int, int], folder: Path) -> Point:
    """Weights and AdamW's state on the disk: written, hashed, synced, renamed."""
    run, size = saved_run(shape, folder)
    seconds = []
    for _ in range(3):
        run.fresh()
        seconds.append(seconds_of(run.save))
    return size, min(seconds)


def resuming(shape: tuple[int, int], folder: Path) -> Point:
    """The newest complete checkpoint found, every file hashed; a model with its weights; its optimizer."""
    run, size = saved_run(shape, folder)
    run.save()
    return size, min(sum(run.resume().values()) for _ in range(3))


def saved_run(shape: tuple[int, int], folder: Path) -> tuple[Any, int]:
    from checkpoint import Run

    from erniekit.model.architectures.model_config import ModelConfig

    config = ModelConfig.from_json(model(*shape))
    shutil.rmtree(folder / "run", ignore_errors=True)
    return Run(config, folder / "run"), config.parameter_count()


CURVES = {
    "tokens": Curve("a step", "tokens", (1024, 2048, 4096, 8192, 16384), tokens),
    "documents": Curve("a step of 4,096 tokens", "documents of equal length", DOCUMENTS, documents, 0, 16),
    "parameters": Curve("a step of 1,024 tokens", "parameters", SHAPES, parameters),
    "ranks": Curve("a step of 2,048 tokens a rank", "data-parallel ranks", (1, 2, 4), ranks, 0),
    "planning": Curve("planning an epoch", "samples", (10**4, 10**5, 10**6, 10**7), planning),
    "saving": Curve("saving a checkpoint", "parameters", SHAPES[2:], saving),
    "resuming": Curve("resuming", "parameters", SHAPES[2:], resuming),
}  # fmt: skip


def one_round(name: str, number: int, folder: Path) -> list[Point]:
    """All points of a curve, in this process."""
    if name != "planning":
        from erniekit.environment import import_paddle

        import_paddle()
    curve = CURVES[name]
    order = curve.points if number % 2 == 0 else curve.points[::-1]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return [curve.measure(point, Path(own)) for point in order]


def rounds_of(name: str, options: argparse.Namespace) -> list[dict[float, float]]:
    """Of every round: what grows -> seconds."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    found = []
    for number in counted(range(options.rounds), name):
        command = [sys.executable, __file__, f"--one={name}", f"--number={number}", f"--folder={options.folder}"]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
        found.append(dict(json.loads(done.stdout.splitlines()[-1])))
        print(f"{name}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def exponent(points: dict[float, float], fitted_from: float) -> float:
    """The slope of the line through the logarithms."""
    fitted = np.log([point for point in points.items() if point[0] >= fitted_from])
    return float(np.polyfit(fitted[:, 0], fitted[:, 1], 1)[0])


def middle(found: list[dict[float, float]]) -> dict[float, float]:
    return {x: statistics.median(points[x] for points in found) for x in sorted(found[0])}


def row(curve: Curve, found: list[dict[float, float]]) -> str:
    slopes, median = [exponent(points, curve.fitted_from) for points in found], middle(found)
    (first, least), *_, (last, most) = [point for point in median.items() if point[0] >= curve.fitted_from]
    return (
        f"| {curve.title} | {curve.grows}, {amount(first)} to {amount(last)} | {least:.3g} to {most:.3g} "
        f"| {statistics.median(slopes):.2f} ({min(slopes):.2f} to {max(slopes):.2f}) | {curve.expected} |"
    )


def amount(x: float) -> str:
    return f"{x / 1e6:.3g} M" if x >= 1e6 else f"{x:,.0f}"


def draw(found: dict[str, list[dict[float, float]]]) -> str:
    """A small plot for every curve, with a line of the expected slope through its last point; its Markdown path."""
    figure, axes = new_plot(rows=2, columns=4, width=12, height=6)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, rounds) in zip(axes.flat, found.items(), strict=False):
        curve, median = CURVES[name], middle(rounds)
        xs, ys = np.array(list(median)), np.array(list(median.values()))
        reach = [[min(points[x] for points in rounds), max(points[x] for points in rounds)] for x in xs]
        axis.errorbar(xs, ys, np.abs(np.array(reach).T - ys), marker="o", markersize=4, capsize=2)
        axis.plot(xs, ys[-1] * (xs / xs[-1]) ** curve.expected, "--", color="grey", label=f"exponent {curve.expected}")
        axis.set(xscale="log", yscale="log", title=curve.title, xlabel=curve.grows, ylabel="seconds")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, high / 10), high)  # noise is not to fill the plot where time stays the same
        if len(xs) <= 4:
            axis.set_xticks(xs, [amount(x) for x in xs])
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_formatter("")
        axis.legend()
    return save_plot(figure, "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of a step; ranks have one each")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for checkpoints")
    parser.add_argument("--write", action="store_true", help=f"into {BENCHMARKS.relative_to(ROOT)}")
    parser.add_argument("--one", choices=CURVES, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_round(options.one, options.number, options.folder)))
        return
    found = {name: rounds_of(name, options) for name in options.curves}
    lines = ["| time of | against | seconds | exponent (range) | without waste |", "|---|---|---:|---:|---:|"]
    lines += [row(CURVES[name], rounds) for name, rounds in found.items()]
    print("\n".join(lines))
    if options.write:
        command = "python tools/bench/cost.py --write" + (f" --rounds {options.rounds}" if options.rounds != 3 else "")
        plot = f"![Time against what grows, logarithmic axes]({draw(found)})"
        table = "\n".join([*lines, "", plot, "", measured_at(command)])
        BENCHMARKS.write_text(with_table("cost", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
