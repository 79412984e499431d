"""Layouts against a single process, as `tools/parity/layouts.py` compares them: a few, and all with `make test-all`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tools.bench.marked import with_table
from tools.parity import layouts
from tools.parity.layout_run import Refused
from tools.parity.layouts import Comparison, Differences, Failed, Layout

BY_NAME = {layout.name: layout for layout in layouts.LAYOUTS}
REFERENCES_ON = (
    "dp2",
    "tp2 + sp",
    "pp2",
    "pp4 x vpp2",
    "sharding1 x 2",
    "sharding2 x 2",
    "sharding3 x 2",
    "tp2 x pp2 + sp",
)
SHORT = [  # of few models and tasks, for each is run on one process first, by every worker
    ("dp2", "dense", "dpo"),
    ("sharding1 x 2", "dense", "dpo"),
    ("pp2", "dense", "sft"),
    ("ep2 over data", "moe", "sft"),
    ("tp2 + sp", "dense", "distill"),
]
REST = [
    *[(name, "dense", "distill") for name in REFERENCES_ON if "pp" not in name],
    *[(name, "dense", task) for name in ("dp2", "tp2 + sp") for task in ("distill-top-k", "distill-on-policy")],
    *[(name, "dense", task) for name in REFERENCES_ON for task in ("dpo-lora", "dpo-copy", "kto")],
    *[(name, "dense", task) for name in REFERENCES_ON for task in ("verdicts", "reward-model")],
    *[(name, "moe", task) for name in ("ep2 over mp", "ep2 over data") for task in ("dpo-lora", "kto")],
    *[(name, "dense", task) for name in (*REFERENCES_ON, "tp4") for task in ("new-tokens", "new-tokens-lora")],
    *[(name, "moe", "new-tokens-lora") for name in ("tp2 + sp", "pp2", "sharding3 x 2", "ep2 over mp")],
    *[(name, "dense", "new-tokens-dpo-lora") for name in ("dp2", "tp2 + sp", "pp2")],
    *[(name, "dense", "reward-model-lora") for name in ("dp2", "tp2 + sp", "pp2")],
    *[(name, "dense", task) for name in REFERENCES_ON for task in ("tts", "tts-ar-nar")],
]
REST += [
    (name, model, task)
    for name, layout in BY_NAME.items()
    for model in layouts.MODELS
    for task in layouts.IN_TABLE
    if (name, model, task) not in SHORT and (model == "moe" or not layout.experts)
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Comparison]:
    """A model and a task on one process, run once for all layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    return cache(lambda model, task: Comparison(model, task, folder))


@pytest.fixture(scope="module")
def short_comparison(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Comparison]:
    """The same with half the layers and fewer steps: a quarter of the time."""
    folder = tmp_path_factory.mktemp("short-layouts")
    return cache(lambda model, task: Comparison(model, task, folder, layers=4, steps=3))


def check(comparison: Callable[[str, str], Comparison], name: str, model: str, task: str) -> None:
    result = comparison(model, task).run_layout(BY_NAME[name])
    assert isinstance(result, Differences), result.reason
    assert not result.too_large(), result


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "task"), SHORT)
def test_a_layout_gives_the_numbers_of_one_process(short_comparison, name: str, model: str, task: str) -> None:
    check(short_comparison, name, model, task)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "model", "task"), REST)
def test_every_layout_gives_the_numbers_of_one_process(comparison, name: str, model: str, task: str) -> None:
    check(comparison, name, model, task)


@pytest.mark.slow
def test_a_run_that_is_not_the_same_is_told_apart(tmp_path: Path) -> None:
    """What the comparison can see: a learning rate that is off by a ten-thousandth, and other rows in a micro-batch."""
    alone = Comparison("dense", "sft", tmp_path, layers=2, steps=3)
    same = alone.run_layout(Layout("recompute", {"recompute": True}))
    assert isinstance(same, Differences) and not same.too_large()
    faster = alone.run_layout(Layout("faster", {"learning_rate": 1.0001e-3}))
    assert isinstance(faster, Differences) and faster.gradient == 0.0 and faster.weights > 1e-6
    other = alone.run_layout(Layout("other samples", {"per_device_train_batch_size": 2}))
    assert isinstance(other, Differences) and len(other.too_large()) == 3


def test_layouts_have_the_ranks_that_their_parameters_need() -> None:
    ranks = {name: (layout.ranks, layout.dp_world_size) for name, layout in BY_NAME.items()}
    assert ranks["tp4"] == (4, 1) and ranks["dp2"] == (2, 2) and ranks["sharding3 x 2"] == (2, 2)
    assert ranks["pp4 x vpp2"] == (4, 1) and ranks["tp2 x sharding2"] == (4, 2) and ranks["pp2 x dp2"] == (4, 2)
    assert all(count <= 4 and layouts.MICRO_BATCHES % dp_world_size == 0 for count, dp_world_size in ranks.values())


def test_differences() -> None:
    own = {"a": np.array([1.0, 2.0]), "b": np.array([[1e-3]])}
    other = {"a": np.array([1.0, 2.5]), "b": np.array([[1.1e-3]])}
    assert layouts.difference(own, other) == pytest.approx(0.5)
    assert layouts.relative_difference(own, other) == pytest.approx(0.2)  # 0.5 of 2.5; b: 0.1 of 1.1
    noise = {"a": np.array([1.0]), "b": np.array([1e-12])}
    silence = {"a": np.array([1.0]), "b": np.array([0.0])}
    assert layouts.relative_difference(noise, silence) == pytest.approx(1e-6)  # not infinite
    with pytest.raises(AssertionError, match="b"):
        layouts.difference(own, {"a": own["a"]})
    with pytest.raises(AssertionError, match="rounded"):
        layouts.difference({"a": np.ones(1, np.float32)}, {"a": np.ones(1, np.float32)})


def test_what_is_too_large_is_told_and_set_in_bold() -> None:
    good, bad = Differences(1e-6, 2e-7, 3e-15), Differences(1e-6, float("nan"), 2e-9)
    assert good.too_large() == [] and bad.too_large() == ["gradient nan", "weights 2.0e-09"]
    results = {("tp2", "sft"): good, ("tp2", "dpo"): Refused("not\n  yet"), ("pp2", "sft"): bad}
    results |= {("pp2", "dpo"): Failed("rank 1 failed")}
    lines = layouts.table("dense", ["sft", "dpo"], results).splitlines()
    assert lines[0] == "| dense | sft | dpo |"
    assert lines[2] == "| tp2 | 1e-06 / 2e-07 / 3e-15 | refused (1) |"
    assert lines[3] == "| pp2 | **1e-06 / nan / 2e-09** | **failed** (2) |"
    assert lines[-2:] == ["(1) not yet", "(2) rank 1 failed"]


def test_the_tables_replace_what_is_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("# Title\n<!-- layouts: begin -->\nold\n<!-- layouts: end -->\nrest\n", encoding="utf-8")
    written = with_table("layouts", "new", document)
    assert written == "# Title\n<!-- layouts: begin -->\nnew\n<!-- layouts: end -->\nrest\n"
    with pytest.raises(SystemExit, match="does not hold the marks"):
        with_table("other", "new", document)
