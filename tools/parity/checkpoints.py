"""How far a run that goes on from a checkpoint is from one that was never interrupted, for pairs of layouts.

    python tools/parity/checkpoints.py [--models dense moe] [--from tp2 ...] [--to pp2 ...] [--at-once 1] [--write]

Every row is a layout that trains as `erniekit train` does, on the shipped data, with dropout and a learning rate that
changes at every step, and leaves a checkpoint in mid-run. Every column is a layout that goes on from it to the end, and
is compared with itself uninterrupted. A cell holds three differences:

  losses    the largest of the continued steps, in float32; at most 1e-5
  weights   the largest after the last step, in float64; at most 1e-9
  moments   AdamW's, after the last step, in float64, relative to the largest value of their tensor; at most 1e-7

On the layout that wrote the checkpoint all of them must be 0, in float32, too. float32 weights of other layouts are not
compared: AdamW divides by the size of a gradient, so the rounding of one near zero becomes a step. `--write` puts the
tables into docs/exactness.md. Exit code 1: a difference is larger than it may be, or a rank has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.ranks import run_ranks
from tools.bench.marked import EXACTNESS, with_table
from tools.parity.layout_run import ROOT, make_model, tensors, train
from tools.parity.layouts import (
    COMMON,
    DIALOGUES,
    LAYOUTS,
    MODELS,
    MOE_PARAMETERS,
    Failed,
    Layout,
    difference,
    relative_difference,
)

STEPS, SAVED = 5, 2
MICRO_BATCHES = 4  # of a step, over all ranks
MAY_DIFFER = {"losses": 1e-5, "weights": 1e-9, "moments": 1e-7}
NAMES = (
    "tp2", "pp2", "sharding1 x 2", "sharding2 x 2", "sharding3 x 2", "tp2 x pp2", "ep2 over mp", "ep2 over data",
)  # fmt: skip
SINGLE_PROCESS = Layout("one process")
FROM_TO = (SINGLE_PROCESS, *(layout for name in NAMES for layout in LAYOUTS if layout.name == name))
RUN_PARAMETERS = {
    "max_steps": STEPS, "save_steps": SAVED, "eval_steps": None, "max_evaluate_steps": None, "hidden_dropout_prob": 0.1,
    "dropout_warmup_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2, "learning_rate": 1e-3,
}  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """What a run has left: the loss of every step it made, weights and moments after the last."""

    losses: np.ndarray
    weights: Mapping[str, np.ndarray]
    moments: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Differences:
    """The largest differences between a resumed and an uninterrupted run; see the top of this file."""

    losses: float
    weights: float
    moments: float
    exact: bool

    def too_large(self) -> list[str]:
        return [f"{name} {vars(self)[name]:.1e}" for name, most in MAY_DIFFER.items() if not vars(self)[name] <= most]

    def __str__(self) -> str:
        return "exact" if self.exact else " / ".join(f"{vars(self)[name]:.0e}" for name in MAY_DIFFER)


Results = Mapping[tuple[str, str], Differences | Failed]  # (layout that wrote, layout that goes on)


class Runs:
    """Runs of one model, each made once.

    Args:
        folder: where models and runs are written.
        layers: of the model.
    """

    def __init__(self, model: str, folder: Path, *, layers: int = 8, timeout: float = 300.0) -> None:
        self.model, self._folder, self._timeout = model, folder, timeout
        self._uninterrupted_runs: dict[tuple[str, str], RunResult] = {}
        if not (folder / model).exists():
            settings = {**MODELS[model], "num_hidden_layers": layers}
            run_ranks(make_model, 1, model_folder=str(folder / model), settings=settings)

    def compare(self, first: Layout, second: Layout) -> Differences:
        """`second` going on from a checkpoint of `first`, with `second` uninterrupted."""
        precise = [self._resumed(first, second, "float64"), self.uninterrupted_run(second, "float64")]
        usual = [self._resumed(first, second, "float32"), self.uninterrupted_run(second, "float32")]
        exact = first == second
        for resumed, uninterrupted_run in (precise, usual):
            exact = exact and _equal(resumed, uninterrupted_run)
        return Differences(
            losses=float(np.abs(usual[0].losses - usual[1].losses[SAVED:]).max()),
            weights=difference(precise[0].weights, precise[1].weights),
            moments=relative_difference(precise[0].moments, precise[1].moments),
            exact=exact,
        )

    def uninterrupted_run(self, layout: Layout, precision: str) -> RunResult:
        """The uninterrupted run of a layout, which has left a checkpoint in mid-run."""
        key = layout.name, precision
        if key not in self._uninterrupted_runs:
            self._uninterrupted_runs[key] = self._run(layout, precision, self._output(layout, precision))
        return self._uninterrupted_runs[key]

    def _resumed(self, first: Layout, second: Layout, precision: str) -> RunResult:
        self.uninterrupted_run(first, precision)
        checkpoint = self._output(first, precision) / f"checkpoint-{SAVED}"
        with tempfile.TemporaryDirectory(dir=self._folder) as output:
            return self._run(second, precision, Path(output) / "run", resume_from_checkpoint=str(checkpoint))

    def _output(self, layout: Layout, precision: str) -> Path:
        return self._folder / f"{self.model} {layout.name} {precision}"

    def _run(self, layout: Layout, precision: str, output: Path, **more: str) -> RunResult:
        values = {
            **COMMON, **DIALOGUES, **(MOE_PARAMETERS if self.model == "moe" else {}), **RUN_PARAMETERS,
            **layout.parameters,
            "model_name_or_path": str(self._folder / self.model),
            "output_dir": str(output),
            "gradient_accumulation_steps": MICRO_BATCHES // layout.dp_world_size,
            **more,
        }  # fmt: skip
        parameters = {name: value for name, value in values.items() if value is not None}
        del parameters["eval_dataset_path"]
        outcomes = run_ranks(train, layout.ranks, timeout=self._timeout, parameters=parameters, precision=precision)
        assert not outcomes[0]["refused"], outcomes[0]["refused"]
        lines = (output / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
        state = tensors(output / f"checkpoint-{STEPS}", "optimizer*.safetensors")
        return RunResult(
            np.array([record["loss"] for record in map(json.loads, lines) if "loss" in record]),
            tensors(output, "model*.safetensors"),
            {name: values for name, values in state.items() if "/moment" in name},
        )


def _equal(resumed: RunResult, uninterrupted_run: RunResult) -> bool:
    kinds = (resumed.weights, uninterrupted_run.weights), (resumed.moments, uninterrupted_run.moments)
    same = all(
        own.keys() == other.keys() and all((own[name] == other[name]).all() for name in own) for own, other in kinds
    )
    return same and bool((resumed.losses == uninterrupted_run.losses[SAVED:]).all())


def table(model: str, results: Results) -> str:
    """A row for each layout that wrote a checkpoint, a column for each that goes on; reasons of failures below it."""
    reasons: list[str] = []

    def cell(first: str, second: str) -> str:
        found = results.get((first, second))
        if found is None:
            return ""
        if isinstance(found, Failed):
            reasons.append(found.reason)
            return f"**failed** ({len(reasons)})"
        wrong = found.too_large() or (first == second and not found.exact)
        return f"**{found}**" if wrong else str(found)

    rows, columns = (list(dict.fromkeys(names)) for names in zip(*results, strict=True))
    lines = [f"| {model}: from, to | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {row} | " + " | ".join(cell(row, column) for column in columns) + " |" for row in rows]
    notes = [f"({number}) {' '.join(reason.split())}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def measure(model: str, pairs: Sequence[tuple[Layout, Layout]], folder: Path, at_once: int = 1) -> Results:
    """Every pair of layouts that makes sense for the model, `at_once` of them at the same time."""
    runs = Runs(model, folder)
    fitting = [pair for pair in pairs if model == "moe" or not any(layout.experts for layout in pair)]

    def one(first: Layout, second: Layout) -> Differences | Failed:
        found: Differences | Failed
        try:
            found = runs.compare(first, second)
        except AssertionError as error:  # a rank has failed, or what runs have left does not fit together
            found = Failed(str(error))
        shown = found.reason if isinstance(found, Failed) else found
        print(f"{model}, {first.name} -> {second.name}: {shown}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        layouts = {layout.name: layout for pair in fitting for layout in pair}.values()
        uninterrupted = [(layout, precision) for layout in layouts for precision in ("float32", "float64")]
        list(pool.map(partial(_quietly, runs), *zip(*uninterrupted, strict=True)))
        found = pool.map(one, *zip(*fitting, strict=True))
        return {(first.name, second.name): each for (first, second), each in zip(fitting, found, strict=True)}


def _quietly(runs: Runs, layout: Layout, precision: str) -> None:
    """Every pair with a layout that fails will say so."""
    with suppress(AssertionError):
        runs.uninterrupted_run(layout, precision)


def wrong(results: Results) -> Iterable[str]:
    """A line for every pair that is not as it should be."""
    for (first, second), found in results.items():
        if isinstance(found, Failed):
            yield f"{first} -> {second}: failed"
        elif found.too_large():
            yield f"{first} -> {second}: {', '.join(found.too_large())}"
        elif first == second and not found.exact:
            yield f"{first} -> {second}: not exact"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layout.name for layout in FROM_TO]
    parser.add_argument("--from", dest="first", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--to", dest="second", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--write", action="store_true", help=f"put the tables into {EXACTNESS.relative_to(ROOT)}")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    args = parser.parse_args()
    pairs = [(a, b) for a in FROM_TO if a.name in args.first for b in FROM_TO if b.name in args.second]
    with tempfile.TemporaryDirectory() as folder:
        results = {model: measure(model, pairs, Path(folder), args.at_once) for model in args.models}
    tables = "\n\n".join(table(model, found) for model, found in results.items())
    print(tables)
    if args.write:
        EXACTNESS.write_text(with_table("checkpoints", f"\n{tables}\n", EXACTNESS), encoding="utf-8")
    lines = [f"{model}, {line}" for model, found in results.items() for line in wrong(found)]
    sys.exit("\n".join(lines) or 0)


if __name__ == "__main__":
    main()
