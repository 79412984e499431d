"""Checkpoints of any layout, taken up by any other, as `tools/parity/checkpoints.py` compares them: one pair, and
all of them with `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tools.bench.marked import EXACTNESS, with_table
from tools.parity import checkpoints
from tools.parity.checkpoints import FROM_TO, MAY_DIFFER, Differences, Failed, RunResult, Runs, table, wrong

BY_NAME = {layout.name: layout for layout in FROM_TO}
SHORT = [("ep2 over mp", "sharding3 x 2", "moe")]  # slices and experts, to divided parameters
ALL = [
    (first.name, second.name, model)
    for first, second in product(FROM_TO, FROM_TO)
    for model in ("dense", "moe")
    if model == "moe" or not (first.experts or second.experts)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """The uninterrupted runs of a model, each made once for all pairs."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda model: Runs(model, folder))


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    """The same with half the layers."""
    folder = tmp_path_factory.mktemp("short-checkpoints")
    return cache(lambda model: Runs(model, folder, layers=4))


def check(runs: Callable[[str], Runs], first: str, second: str, model: str) -> None:
    found = runs(model).compare(BY_NAME[first], BY_NAME[second])
    assert not list(wrong({(first, second): found})), found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "model"), SHORT)
def test_a_layout_goes_on_from_a_checkpoint_of_another(short_runs, first: str, second: str, model: str) -> None:
    check(short_runs, first, second, model)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "second", "model"), [pair for pair in ALL if pair not in SHORT])
def test_every_layout_goes_on_from_a_checkpoint_of_every_other(runs, first: str, second: str, model: str) -> None:
    check(runs, first, second, model)


def left(loss: float = 1.0, moment: float = 0.5) -> RunResult:
    return RunResult(np.array([3.0, 2.0, loss]), {"weight": np.ones(2)}, {"weight/moment1": np.array([1.0, moment])})


@pytest.mark.parametrize("resumed", [left(loss=1.1), left(moment=0.501)])
def test_a_run_that_goes_on_otherwise_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: RunResult
) -> None:
    (tmp_path / "dense").mkdir()
    found = Runs("dense", tmp_path)
    monkeypatch.setattr(found, "uninterrupted_run", lambda layout, precision: left())
    shortened = RunResult(resumed.losses[checkpoints.SAVED :], resumed.weights, resumed.moments)
    monkeypatch.setattr(found, "_resumed", lambda first, second, precision: shortened)
    differences = found.compare(FROM_TO[0], FROM_TO[0])
    assert differences.too_large() and not differences.exact


def test_what_is_wrong_is_said_and_marked() -> None:
    fine, inexact = Differences(1e-7, 1e-12, 1e-12, exact=False), Differences(0.0, 0.0, 0.0, exact=False)
    bad = Differences(losses=1.0, weights=0.0, moments=0.0, exact=False)
    results = {("a", "b"): fine, ("b", "a"): bad, ("a", "a"): inexact, ("b", "b"): Failed("rank 1\nended")}
    assert list(wrong(results)) == ["b -> a: losses 1.0e+00", "a -> a: not exact", "b -> b: failed"]
    shown = table("dense", results)
    assert "| a | 1e-07 / 1e-12 / 1e-12 | **0e+00 / 0e+00 / 0e+00** |" in shown
    assert "(1) rank 1 ended" in shown
    assert MAY_DIFFER.keys() == {"losses", "weights", "moments"}


def test_the_table_is_written_between_its_marks() -> None:
    text = with_table("checkpoints", "| a |", EXACTNESS)
    assert "<!-- checkpoints: begin -->\n| a |\n<!-- checkpoints: end -->" in text
