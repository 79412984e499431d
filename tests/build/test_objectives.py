"""Which losses and references a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.build import objectives
from erniekit.config import Config
from erniekit.training.objectives.reference import EVALUATION


def test_further_predictions_have_their_weight(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "supervised", lambda **named: named)
    told: Any = objectives.supervised_objective(make_config(multi_token_pred_lambda=0.25))
    assert told["multi_token_pred_lambda"] == 0.25


class _Reference:
    def __init__(self) -> None:
        self.updates = 0

    def tensors(self) -> dict[str, Any]:
        return {}

    def update(self) -> None:
        self.updates += 1


PAIRS: dict[str, Any] = {"stage": "DPO", "continue_training": True}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "precomputed"),
        ({"lora": True}, "adapters"),
        ({"reference_model": "copy"}, "copy"),
        ({"ref_model_update_steps": 2}, "copy"),
        ({"reference_free": True}, "none"),
    ],
    ids=str,
)
def test_the_kind_of_the_reference(
    values: dict[str, Any], kind: str, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = ["none"]
    reference = _Reference()
    kinds = {
        "disabled_adapters_reference": ("adapters", reference),
        "frozen_copy_reference": ("copy", reference),
        "precomputed_references": ("precomputed", {objectives.TRAINING: None}),
    }
    for name, (found, made) in kinds.items():
        answer = (lambda found, made: lambda *parts, **named: seen.append(found) or made)(found, made)
        monkeypatch.setattr(objectives, name, answer)
    monkeypatch.setattr(objectives, "_pairs_of_run", lambda *parts: {})
    config = make_config(**PAIRS, **values)
    training, _ = objectives.preference_objectives(config, None, None, None)  # type: ignore[arg-type]
    assert seen[-1] == kind
    for step in range(1, 7):
        if training.after_update is not None:
            training.after_update(step)
    assert reference.updates == (3 if "ref_model_update_steps" in values else 0)


@pytest.mark.parametrize(("limit", "batches"), [(-1, 5), (2, 2), (9, 5)])
def test_pairs_are_computed_as_far_as_an_evaluation_goes(
    limit: int, batches: int, make_config: Callable[..., Config]
) -> None:
    plan = SimpleNamespace(
        steps_in_epoch=lambda epoch: 5, local_steps=lambda stop: [(step, step) for step in range(stop)], dataset=None
    )
    data: Any = SimpleNamespace(plan=SimpleNamespace(dataset=None), evaluation_plan=plan, total_steps=1)
    pairs = objectives._pairs_of_run(make_config(**PAIRS, max_evaluate_steps=limit), data, 0)
    assert len(list(pairs[EVALUATION].batches())) == batches
