"""Levels are written as passes over the whole sequence would write them, one code at a time and then level by level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import pytest

from erniekit.build.speech_tokens import SpeechTokens
from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.errors import UserError
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import PIECE_BITS, PreparedUtterance, Written
from erniekit.inference.speaking.ar_nar import ArNar
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.code_layers import code_logits
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights
from erniekit.model.weights import named_weights
from tests.model.tiny_speech import CODES, LEVELS, hidden_of, speaking_model, vall_e_config

TOKENS = SpeechTokens(50, (40, 41, 42, 43), {"continuation": 44, "stt": 45}, (46, 47), (48, 49))
GREEDY, PLAIN = Sampling(temperature=0.0, seed=3), SpeakingParameters()
VOICE = np.random.default_rng(3).integers(0, CODES, (LEVELS, 5))


def request(text: list[int], voice: np.ndarray | None = None, number: int = 0, **changes: Any) -> PreparedUtterance:
    return PreparedUtterance(text, None, voice, [], number, 9)._replace(**changes)


REQUESTS = [
    request([5, 6, 7]),
    request([8, 9], VOICE, 1),
    request([3], VOICE[:, :2], 2, language_ids=[11, 12], continues=True, most_frames=6),
]


def decoder_of(**changes: Any) -> Any:
    return speaking_model(vall_e_config(**changes))


@pytest.fixture(scope="module")
def decoder() -> Any:
    return decoder_of()


def writer(decoder: Any, sampling: Sampling = GREEDY, settings: SpeakingParameters = PLAIN, **changes: Any) -> ArNar:
    return ArNar(decoder, code_layout(decoder.config), TOKENS, settings, sampling, **changes)


def write(decoder: Any, requests: list[PreparedUtterance], *arguments: Any, **changes: Any) -> list[Written]:
    return sorted(writer(decoder, *arguments, **changes).write(requests))


def row_of(own: PreparedUtterance, codes: np.ndarray, level: int, decoder: Any) -> dict[str, np.ndarray]:
    """The sequence `text sep language sep level sep voice task sep response` of a level, segment after segment."""
    layout = code_layout(decoder.config)
    segments = [[46, *own.text_ids, 47, 50]]
    segments += [[48, *own.language_ids, 49, 50]] if own.language_ids else []
    segments += [[40 + level, 50]]
    ids = [token for segment in segments for token in segment]
    table = [[-1] * LEVELS for _ in ids]
    positions = [place for segment in segments for place in range(len(segment))]
    if own.voice_codes is not None:
        for frame, column in enumerate(own.voice_codes.T):
            levels = range(max(1, level))
            table.append([layout.prompts[j] + column[j] if j in levels else -1 for j in range(LEVELS)])
            ids.append(0)
            positions.append(frame)
        for place, token in enumerate([44, 50] if own.continues else [50], start=own.voice_codes.shape[1]):
            ids.append(token)
            table.append([-1] * LEVELS)
            positions.append(place)
    for frame, column in enumerate(codes.T):
        rows = [layout.written + column[0]] if level == 0 else [layout.whole[j] + column[j] for j in range(level)]
        table.append(rows + [-1] * (LEVELS - len(rows)))
        ids.append(0)
        positions.append(frame)
    length = len(ids)
    causal = level == 0 or not layout.both_ways
    columns = [[length, column if causal else 0] for column in range(length)]
    return {
        "input_ids": np.array([ids]),
        "codes": np.array([table]),
        "position_ids": np.array([positions if layout.restarts_positions else range(length)]),
        "columns": np.array([[columns]], np.int32),
    }


def expected(decoder: Any, own: PreparedUtterance) -> np.ndarray:
    """The likeliest codes, found by whole passes for each of them."""
    codes = np.zeros((1, 0), np.int64)
    with paddle.no_grad():
        while codes.shape[1] < own.most_frames:
            hidden = hidden_of(decoder, row_of(own, codes, 0, decoder))[0, -1:]
            code = int(code_logits(decoder, hidden, 0).argmax())
            if code == CODES:
                break
            codes = np.append(codes, [[code]], axis=1)
        for level in range(1, LEVELS):
            hidden = hidden_of(decoder, row_of(own, codes, level, decoder))[0, -codes.shape[1] :]
            codes = np.append(codes, code_logits(decoder, hidden, level).argmax(-1).numpy()[None], axis=0)
    return codes


@pytest.mark.parametrize("changes", [{}, {"unified_position_ids": False}, {"noncausal_masks": False}], ids=str)
def test_greedy_codes_are_those_of_whole_passes(changes: dict) -> None:
    decoder = decoder_of(**changes)
    for own, written in zip(REQUESTS, write(decoder, REQUESTS), strict=True):
        codes = expected(decoder, own)
        np.testing.assert_array_equal(written.codes, codes)
        assert written.cut == (codes.shape[1] == own.most_frames)


def test_both_rules_of_positions_and_masks_act(decoder: Any) -> None:
    plain = [written.codes for written in write(decoder, REQUESTS)]
    for changes in ({"unified_position_ids": False}, {"noncausal_masks": False}):
        others = [written.codes for written in write(decoder_of(**changes), REQUESTS)]
        assert any(a.shape != b.shape or (a != b).any() for a, b in zip(plain, others, strict=True)), changes


def test_it_may_end_at_once(decoder: Any) -> None:
    decoder = decoder_of(classifiers_bias=True)
    bias = named_weights(decoder)["classifiers.proj.0.bias"]
    bias.set_value(np.eye(CODES + 1, dtype=np.float32)[CODES] * 1e4)
    (first, second) = write(decoder, REQUESTS[:2])
    assert first.codes.shape == second.codes.shape == (LEVELS, 0) and not first.cut
    bias.set_value(-np.eye(CODES + 1, dtype=np.float32)[CODES] * 1e4)
    assert [(written.codes.shape[1], written.cut) for written in write(decoder, REQUESTS)] == [
        (9, True),
        (9, True),
        (6, True),
    ]


@pytest.mark.proves("class_temperature")
def test_draws_depend_on_the_number_of_a_request_alone(decoder: Any) -> None:
    sampling = replace(GREEDY, temperature=1.0)
    drawn = replace(PLAIN, class_temperature=1.0)
    together = write(decoder, REQUESTS, sampling, drawn)
    for own, written in zip(REQUESTS, together, strict=True):
        (alone,) = write(decoder, [own], sampling, drawn)
        np.testing.assert_array_equal(alone.codes, written.codes)
    others = write(decoder, [own._replace(number=own.number + 10) for own in REQUESTS], sampling, drawn)
    assert any(
        a.codes.shape != b.codes.shape or (a.codes != b.codes).any() for a, b in zip(together, others, strict=True)
    )


def test_classes_of_later_levels_are_drawn_where_a_temperature_is_given(decoder: Any) -> None:
    likeliest, drawn = (write(decoder, REQUESTS, GREEDY, replace(PLAIN, class_temperature=t)) for t in (0.0, 5.0))
    for one, other in zip(likeliest, drawn, strict=True):
        np.testing.assert_array_equal(one.codes[0], other.codes[0])
    assert any((one.codes[1] != other.codes[1]).any() for one, other in zip(likeliest, drawn, strict=True))


@pytest.mark.proves("min_p")
def test_min_p_of_one_takes_the_likeliest_code(decoder: Any) -> None:
    sampling = replace(GREEDY, temperature=5.0)
    greedy = write(decoder, REQUESTS)
    same = write(decoder, REQUESTS, sampling, replace(PLAIN, min_p=1.0))
    other = write(decoder, REQUESTS, sampling, replace(PLAIN, min_p=0.0))
    assert all(np.array_equal(a.codes, b.codes) for a, b in zip(greedy, same, strict=True))
    assert not all(np.array_equal(a.codes, b.codes) for a, b in zip(greedy, other, strict=True))


def test_a_text_that_leaves_no_room_is_told(decoder: Any) -> None:
    long = request([5] * 300)._replace(number=(41 << PIECE_BITS) + 3)
    with pytest.raises(UserError, match=r"text 42 and its voice have .* and the model has 256"):
        write(decoder, [REQUESTS[0], long])


def test_logits_that_are_not_finite_are_told() -> None:
    decoder = decoder_of()
    norm = named_weights(decoder)["model.norm.weight"]
    norm.set_value(np.full(norm.shape, np.nan, np.float32))
    with pytest.raises(UserError, match="cannot speak text 1: its logits are not finite"):
        write(decoder, REQUESTS[:1])


@pytest.mark.proves("lora_codebooks")
def test_adapters_act_at_the_levels_that_they_serve(decoder: Any) -> None:
    adapted = decoder_of()
    add_adapters(adapted, LoraSettings(4, 8.0), seed=1)
    rng = np.random.default_rng(5)
    for parameter in named_adapter_weights(adapted).values():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))
    plain, everywhere = write(decoder, REQUESTS), write(adapted, REQUESTS)
    assert not any(np.array_equal(a.codes, b.codes) for a, b in zip(plain, everywhere, strict=True))
    third = write(adapted, REQUESTS, adapted=(3,))
    for own, other in zip(plain, third, strict=True):
        np.testing.assert_array_equal(own.codes[:3], other.codes[:3])
    assert any((a.codes[3] != b.codes[3]).any() for a, b in zip(plain, third, strict=True))
