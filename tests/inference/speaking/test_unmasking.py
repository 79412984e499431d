"""Codes are unmasked as the package `omnivoice` does it, step by step (tools/parity/record_speaking.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest

from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.errors import UserError
from erniekit.inference.speaking import PreparedUtterance, code_passes
from erniekit.inference.speaking.unmasking import Unmasking, gumbel, predicted, schedule, surest, time_steps
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.builder import build_model
from erniekit.model.storage.safetensors import write_safetensors
from erniekit.model.weights import named_weights
from tests.inference.speaking.speaking_cases import (
    CODES,
    LEVELS,
    RECORDED,
    RUNS,
    SCHEDULES,
    SEED,
    TASKS,
    voice_codes,
)
from tests.model.seeded_weights import seeded_weight
from tests.model.tiny_speech import omnivoice_config, speaking_model

OUR_NAMES = {"num_step": "unmask_steps", "t_shift": "time_shift", "layer_penalty_factor": "layer_penalty"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of the recorded runs."""
    folder, shapes = tmp_path_factory.mktemp("model"), omnivoice_config().weight_shapes()
    weights = ((name, seeded_weight(name, tuple(shape), SEED)) for name, shape in shapes.items())
    write_safetensors(folder / "model.safetensors", shapes, weights)
    return build_model(omnivoice_config(), folder)


@pytest.fixture(scope="module")
def recorded() -> Any:
    return np.load(RECORDED / "unmasking.npz")


def requests_of(recorded: Any, name: str) -> list[PreparedUtterance]:
    return [
        PreparedUtterance(
            recorded[f"{name}-{number}-ids"].tolist(), task[1], voice_codes(task[2][1]) if task[2] else None, [], number
        )
        for number, task in enumerate(TASKS)
    ]


def settings_of(name: str) -> SpeakingParameters:
    return SpeakingParameters(**{OUR_NAMES.get(key, key): value for key, value in RUNS[name].items()})


def unmasking(decoder: Any, settings: SpeakingParameters) -> Unmasking:
    return Unmasking(decoder, code_layout(decoder.config), settings, SEED)


@pytest.mark.parametrize("name", RUNS)
def test_every_step_writes_the_codes_of_the_package(decoder: Any, recorded: Any, name: str) -> None:
    steps: dict[int, list[np.ndarray]] = {number: [] for number in range(len(TASKS))}
    for number, codes in unmasking(decoder, settings_of(name)).steps(requests_of(recorded, name)):
        steps[number].append(codes)
    for number, found in steps.items():
        np.testing.assert_array_equal(found, recorded[f"{name}-{number}-steps"])


def test_schedules_are_those_of_the_package() -> None:
    recorded = json.loads((RECORDED / "schedules.json").read_text())
    assert [schedule(*case) for case in SCHEDULES] == recorded
    assert all(sum(counts) == case[0] for case, counts in zip(SCHEDULES, recorded, strict=True))


@pytest.mark.proves("time_shift", "unmask_steps")
def test_a_small_shift_writes_few_codes_first() -> None:
    assert time_steps(4, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert schedule(100, 4, 1.0) == [25, 25, 25, 25]
    early, late = schedule(100, 4, 0.1), schedule(100, 4, 10.0)
    assert early == sorted(early) and late == sorted(late, reverse=True)
    assert len(schedule(100, 7, 0.1)) == 7


@pytest.mark.proves("layer_penalty")
def test_the_penalty_puts_lower_levels_first() -> None:
    scores = np.array([[-3, -4, -5], [-1, -2, -2.5]], np.float32)
    nothing = np.zeros((2, 3), bool)
    assert surest(scores, nothing, 3, layer_penalty=0.0).tolist() == [3, 4, 5]
    assert surest(scores, nothing, 3, layer_penalty=5.0).tolist() == [0, 1, 2]
    written = np.array([[True, False, False], [False, False, False]])
    assert surest(scores, written, 3, layer_penalty=5.0).tolist() == [1, 2, 3]


def test_the_first_of_equal_scores_is_written() -> None:
    assert surest(np.zeros((2, 4), np.float32), np.zeros((2, 4), bool), 3, layer_penalty=0.0).tolist() == [0, 1, 2]


@pytest.mark.proves("position_temperature")
def test_positions_are_drawn_by_their_scores() -> None:
    rng, counts = np.random.default_rng(0), np.zeros(2)
    scores = np.log(np.array([[0.2, 0.8]], np.float32))
    for _ in range(2000):
        uniforms = rng.random((1, 2), np.float32)
        (place,) = surest(scores, np.zeros((1, 2), bool), 1, layer_penalty=0.0, temperature=1.0, uniforms_CT=uniforms)
        counts[place] += 1
    assert counts[0] / 2000 == pytest.approx(0.2, abs=4 * (0.16 / 2000) ** 0.5)


def test_gumbel_noise_is_finite_everywhere() -> None:
    noise = gumbel(np.array([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))], np.float32))
    assert np.isfinite(noise).all() and noise.dtype == np.float32 and (np.diff(noise) > 0).all()


@pytest.mark.proves("guidance_scale")
def test_guidance_moves_probabilities_away_from_those_without_the_text() -> None:
    with_text, without = (
        paddle.to_tensor(np.log([values]).astype(np.float32)) for values in ([0.5, 0.3, 0.2], [0.8, 0.1, 0.1])
    )
    assert predicted(with_text)[0].tolist() == [0]
    codes, sure = predicted(with_text, without, scale=2.0)
    expected = np.array([0.5**3 / 0.8**2, 0.3**3 / 0.1**2, 0.2**3 / 0.1**2])
    assert codes.tolist() == [1] and sure[0] == pytest.approx(np.log(expected[1] / expected.sum()), abs=1e-5)
    assert predicted(with_text, without, scale=2.0, mask_id=1)[0].tolist() == [2]


@pytest.mark.proves("class_temperature")
def test_codes_are_drawn_from_the_likeliest_tenth() -> None:
    rng = np.random.default_rng(1)
    probabilities = np.full(30, 0.01)
    probabilities[[4, 11, 20]] = 0.2, 0.4, 0.13
    logits = paddle.to_tensor(np.tile(np.log(probabilities), (3000, 1)).astype(np.float32))
    codes, sure = predicted(logits, temperature=1.0, uniforms=rng.random((3000, 30), np.float32))
    share = np.bincount(codes, minlength=30) / 3000
    np.testing.assert_allclose(share[[4, 11, 20]], np.array([0.2, 0.4, 0.13]) / 0.73, atol=0.04)
    assert share.sum() == pytest.approx(share[[4, 11, 20]].sum())
    assert sure[0] == pytest.approx(np.log(0.4 / probabilities.sum()), abs=1e-5)


def test_requests_do_not_change_each_other(decoder: Any, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = unmasking(decoder, settings_of("classes"))
    requests = requests_of(recorded, "classes")
    together = {written.request: written.codes for written in writer.write(requests)}
    assert [codes.shape for codes in together.values()] == [(LEVELS, task[1]) for task in TASKS]
    assert all((codes < CODES).all() for codes in together.values())
    for number, request in enumerate(requests):
        (alone,) = writer.write([request])
        np.testing.assert_array_equal(alone.codes, together[number])
    monkeypatch.setattr(code_passes, "MAX_POSITIONS", 10)
    (moved, _) = writer.write([requests[0]._replace(number=7), requests[1]])
    assert (moved.codes != together[0]).any()


def test_logits_that_are_not_finite_are_told(recorded: Any) -> None:
    decoder = speaking_model(omnivoice_config())
    norm = named_weights(decoder)["llm.norm.weight"]
    norm.set_value(np.full(norm.shape, np.nan, np.float32))
    with pytest.raises(UserError, match="cannot speak text 1: its logits are not finite"):
        list(unmasking(decoder, settings_of("plain")).write(requests_of(recorded, "plain")))


def test_a_row_has_as_many_documents_as_fit() -> None:
    assert list(code_passes.grouped([3, 4, 5, 20, 1, 2], limit=10)) == [[0, 1], [2], [3], [4, 5]]
    assert list(code_passes.grouped([])) == []


def test_the_mode_of_the_decoder_stays(recorded: Any) -> None:
    decoder = speaking_model(omnivoice_config(), hidden_dropout=0.5)
    decoder.train()
    writer = unmasking(decoder, replace(settings_of("plain"), unmask_steps=2))
    first, second = (next(iter(writer.write(requests_of(recorded, "plain")))).codes for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert decoder.training


def test_what_is_not_asked_for_is_neither_computed_nor_drawn(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = PreparedUtterance([5, 6, 7], 4, None, [], 0, 9)
    settings = SpeakingParameters(unmask_steps=1, guidance_scale=0.0, position_temperature=0.0)
    drawn = []

    def chosen(*given: Any, uniforms_CT: np.ndarray | None, **named: Any) -> Any:
        drawn.append(uniforms_CT)
        return surest(*given, uniforms_CT=uniforms_CT, **named)

    monkeypatch.setattr("erniekit.inference.speaking.unmasking.surest", chosen)
    writer = unmasking(decoder, settings)
    assert len(writer._documents(own)) == 1 and len(unmasking(decoder, SpeakingParameters())._documents(own)) == 2
    assert len(list(writer.write([own]))) == 1 and drawn == [None]
