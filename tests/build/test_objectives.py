"""Which losses and references a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.build import objectives
from erniekit.config import Config
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights
from erniekit.training.objectives.reference import EVALUATION
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import StepResult, train_step
from tests.training.code_batches import batch_of, documents, speaking_config


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


SPEECH: dict[str, Any] = {"stage": "TTS", "train_dataset_type": "codes"}
WEIGHTS = (8.0, 6.0, 4.0, 2.0)  # of config.json of the tiny model


def code_loss(config: Config, objective: str) -> StepResult:
    model = build_model(speaking_config(objective), None, seed=5)
    batch = batch_of(objective, [documents(objective, 3, 6)])
    optimizer = build_optimizer(dict(named_weights(model)), config.training)
    built = objectives.speech_objective(config, model)
    return train_step(model, model.parameters(), optimizer, built, [batch], step=0, learning_rate=0.0)


@pytest.mark.proves("tts_objective", "audio_codebook_weights")
@pytest.mark.parametrize("given", [(), (1.0, 0.0, 3.0, 0.0)])
def test_masked_codes_are_weighted_by_level(make_config: Callable[..., Config], given: tuple[float, ...]) -> None:
    values = {"audio_codebook_weights": ",".join(map(str, given))} if given else {}
    totals = code_loss(make_config(**SPEECH, **values), "masked").totals
    weights = np.array(given or WEIGHTS)
    means = [totals.metrics[f"loss_{level}"] for level in range(4)]
    assert totals.loss == pytest.approx(np.dot(weights, means) / weights.sum(), rel=1e-5)


@pytest.mark.proves("tts_objective", "audio_codebook_weights", "loss_factors")
def test_parts_and_levels_have_their_factors(make_config: Callable[..., Config]) -> None:
    """The loss is linear in the factors of its parts, and that of responses in the factors of levels."""

    def loss(factors: str, levels: str = "") -> float:
        values = {"loss_factors": factors} | ({"audio_codebook_weights": levels} if levels else {})
        config = make_config(**SPEECH, tts_objective="ar_nar", **values)
        return code_loss(config, "ar_nar").totals.loss

    transcripts = loss("0,0,1", "0,0,0,0.000001")
    text, prompt, response = (loss(",".join("1" if each == one else "0" for each in range(3))) for one in range(3))
    text, prompt, response = text - transcripts, prompt - transcripts, response - transcripts
    assert min(text, prompt, response) > 0.1
    assert loss("0.5,0.25,2") == pytest.approx(transcripts + 0.5 * text + 0.25 * prompt + 2 * response, rel=1e-4)
    assert loss("0,0,1", "3,3,3,3") == pytest.approx(transcripts + 3 * response, rel=1e-4)


def test_a_run_says_what_is_predicted(make_config: Callable[..., Config], logged: list[str]) -> None:
    model: Any = SimpleNamespace(config=speaking_config("masked"))
    objectives.speech_objective(make_config(**SPEECH), model)
    model.config = speaking_config("ar_nar")
    objectives.speech_objective(make_config(**SPEECH, tts_objective="ar_nar", loss_factors="0.1,0,1"), model)
    assert logged[-2:] == [
        "objective: masked codes, weights 0.4 0.3 0.2 0.1",
        "objective: AR and NAR codes, loss factors 0.1 (text), 0 (prompt), 1 (response; its levels 1 1 1 1)",
    ]


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

    def making(found: str, made: Any) -> Callable[..., Any]:
        return lambda *parts, **named: seen.append(found) or made

    for name, (found, made) in kinds.items():
        monkeypatch.setattr(objectives, name, making(found, made))
    monkeypatch.setattr(objectives, "_pairs_of_run", lambda *parts: {})
    config = make_config(**PAIRS, **values)
    training, _ = objectives.preference_objectives(objectives.preference_objective, config, None, None, None)  # type: ignore[arg-type]
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
