"""Which model a preference loss compares with, from a configuration; nothing is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import reference
from erniekit.config import Config
from erniekit.training.checkpoint.tensors import NO_TENSORS
from erniekit.training.collectives import SINGLE_PROCESS
from tests.model.tiny import tiny_model

PAIRS: dict[str, Any] = {"stage": "DPO", "continue_training": True}
LORA = {"lora": True}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is opened from now on: the reference that is named, the model that the run starts from, or its base."""
    seen: list[Any] = []
    config = SimpleNamespace(vocab_size=1)
    replacements: dict[str, Callable[..., Any]] = {
        "adapter_plan": lambda config, model: None,
        "apply_mixed_precision": lambda config, model, log_level: None,
        "build_model": lambda model, weights, **named: seen.append(weights) or SimpleNamespace(eval=lambda: None),
        "find_model_folder": lambda name, hub, **named: Path(name),
        "initial_adapters": lambda config: None,
        "initial_weights": lambda config: Path("start"),
        "log_prob_fn": lambda config, ranks: None,
        "model_shard_arguments": lambda *parts: {},
        "named_adapter_weights": lambda model: {},
        "named_weights": lambda model: {},
        "open_model": lambda config, weights, **named: seen.append(weights),
        "read_model_config": lambda path: config,
        "reference_config": lambda config, model: config,
        "AdapterReference": lambda *parts, **named: seen.append("adapters") or parts,
        "FrozenReference": lambda *parts, updated, ranks: ("frozen", updated),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(reference, name, replacement)
    return seen


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        (LORA, ["adapters"]),
        ({"ref_model_name_or_path": "other"}, [Path("other")]),
        (LORA | {"ref_model_name_or_path": "other"}, [Path("other")]),
        ({"loss_type": "simpo"}, []),
    ],
    ids=str,
)
def test_what_an_evaluation_compares_with(
    values: dict[str, Any], expected: list[Any], make_config: Callable[..., Config], opened: list[Any]
) -> None:
    reference.evaluation_reference(make_config(**PAIRS, **values), None, SINGLE_PROCESS, None)  # type: ignore[arg-type]
    assert opened == expected


def test_the_base_of_adapters_that_have_taken_a_part_of_it_is_built_anew(
    make_config: Callable[..., Config], opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    adapters = SimpleNamespace(folder=None, settings=SimpleNamespace(init="pissa"))
    monkeypatch.setattr(reference, "adapter_plan", lambda config, model: adapters)
    monkeypatch.setattr(reference, "build_model", lambda *parts, seed, **named: seeds.append(seed))
    config = make_config(**PAIRS, **LORA, seed=7)
    made = reference.evaluation_reference(config, None, SINGLE_PROCESS, None)  # type: ignore[arg-type]
    assert made == ("frozen", False) and seeds == [7]


@pytest.mark.parametrize(
    ("values", "expected"), [({}, Path("start")), ({"ref_model_name_or_path": "other"}, Path("other"))], ids=str
)
def test_which_model_is_copied(
    values: dict[str, Any], expected: Path, make_config: Callable[..., Config], opened: list[Any]
) -> None:
    reference.open_reference_model(make_config(**PAIRS, **values))
    assert opened == [expected]


@pytest.mark.parametrize(("values", "updated"), [({}, False), ({"ref_model_update_steps": 3}, True)], ids=str)
def test_a_copy_knows_whether_it_is_updated(
    values: dict[str, Any], updated: bool, make_config: Callable[..., Config], opened: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = make_config(**PAIRS, **values)
    made = reference.frozen_copy_reference(config, None, NO_TENSORS, SINGLE_PROCESS, None)  # type: ignore[arg-type]
    assert made == ("frozen", updated)


@pytest.mark.parametrize(("values", "kept"), [({}, None), ({"lora_init": "pissa"}, {"adapter": 1})], ids=str)
def test_adapters_that_act_from_the_beginning_are_kept(
    values: dict[str, Any], kept: Any, make_config: Callable[..., Config], opened: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reference, "clone_tensors", lambda trained: {"adapter": 1})
    config = make_config(**PAIRS, **LORA, **values)
    made: Any = reference.disabled_adapters_reference(config, None, NO_TENSORS, SINGLE_PROCESS, fresh=True)  # type: ignore[arg-type]
    assert made[2] == kept


@pytest.mark.parametrize(
    ("values", "computed_by"), [({}, "the model itself"), ({"ref_model_name_or_path": "other"}, "another")], ids=str
)
def test_what_is_precomputed_by_which_model(
    values: dict[str, Any], computed_by: str, make_config: Callable[..., Config], opened: list[Any],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    used: list[Any] = []
    model: Any = SimpleNamespace(parameters=list)
    monkeypatch.setattr(reference, "open_reference_model", lambda config, mesh: SimpleNamespace(parameters=list))
    monkeypatch.setattr(
        reference, "table_path", lambda folder, dataset, used_model, ranks, precision: tmp_path / "table"
    )
    monkeypatch.setattr(reference, "read_table", lambda path, shape: 0.0)
    monkeypatch.setattr(
        reference, "precompute_missing_logps", lambda table, batches, by, *parts: used.append(by is model) or 0
    )
    pairs: Any = SimpleNamespace(batches=list)
    pairs.dataset = type("Pairs", (), {"__len__": lambda self: 1, "location": None})()
    reference.precomputed_references(
        make_config(**PAIRS, **values),
        model,
        {"training": pairs},
        NO_TENSORS,
        SINGLE_PROCESS,
        None,
        fresh=True,  # type: ignore[arg-type]
    )
    assert used == [computed_by == "the model itself"]


def test_a_table_is_of_one_precision(tmp_path: Path) -> None:
    pairs: Any = type("Pairs", (), {"__len__": lambda self: 2, "fingerprint": "pairs"})()
    plain, same, wide = (reference.table_path(tmp_path, pairs, tiny_model(), precision=of) for of in ("", "", "bf16"))
    assert plain == same != wide
