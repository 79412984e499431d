"""Samples of masked codes: the package's rules replayed number for number, shares of draws, and independence."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from erniekit.data.code_reader import CodeReader
from erniekit.data.drawing import SpokenFacts
from erniekit.data.masked_codes import MaskedCodes, draw_choices
from erniekit.data.mixing import Purpose, generator
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.data.token_cache import TokenArrays
from tests.data.coded_recordings import CODEBOOK_SIZE, FRAME_RATE, LEVELS, STYLE, masked, recordings

NONE = list(STYLE.none)


def source_of(settings: MaskedCodes, arrays: TokenArrays, number: int = 0):
    return settings.source(arrays, number, CodeReader(arrays))


def replayed(settings: MaskedCodes, arrays: TokenArrays, index: int, epoch: int, number: int = 0):
    """The ids, codes [C, T] and labels of a recording by the package's steps, one after another, with our numbers."""
    n, reader = len(arrays.lines), CodeReader(arrays)
    u = generator(Purpose.CODE_CHOICES, settings.seed, epoch, number).random((n, 16))[index]
    frames = SpokenFacts.of(arrays.spoken).frames
    stream = generator(Purpose.CODE_MASKS, settings.seed, epoch, number).random(int(frames.sum()) * LEVELS)
    first = int(frames[:index].sum()) * LEVELS
    codes = reader.codes(index)
    uniform = stream[first : first + codes.size].reshape(codes.shape)
    text, pinyin, language, instruct = (values.tolist() for values in reader.texts(index))
    clean_start = int(SpokenFacts.of(arrays.spoken).clean_start[index])
    drop = clean_start < 0 and u[0] < settings.condition_dropout
    tells_language = tells_instruct = False
    share = 0.0
    if not drop:
        low, high = settings.prompt_ratio
        share = low + (high - low) * u[1]
        tells_language = u[2] < settings.language
        tells_instruct = u[3] < settings.instruct
        if tells_instruct and u[4] < settings.only_instruct:
            share = 0.0
    low, high = settings.mask_ratio
    ratio = low + (high - low) * u[5]
    style = [*STYLE.denoise] if clean_start >= 0 else []
    style += [*STYLE.lang_start, *(language if tells_language and language else NONE), *STYLE.lang_end]
    style += [*STYLE.instruct_start, *(instruct if tells_instruct and instruct else NONE), *STYLE.instruct_end]
    said = pinyin if pinyin and u[6] < settings.pinyin else text
    ids = [] if drop else [*style, *STYLE.text_start, *said, *STYLE.text_end]
    prompt = clean_start if clean_start >= 0 else int(codes.shape[1] * share)
    inputs, labels = codes.copy(), codes.copy()
    hidden = uniform[:, prompt:] < ratio
    inputs[:, prompt:][hidden] = settings.mask_id
    labels[:, prompt:][~hidden] = IGNORE_INDEX
    if not drop:
        labels[:, :prompt] = IGNORE_INDEX
    return ids, inputs, labels


def assert_equals_replay(sample: Sample, settings: MaskedCodes, expected) -> None:
    ids, inputs, labels = expected
    frames = inputs.shape[1]
    assert sample.input_ids[: len(ids)].tolist() == ids and len(sample.input_ids) == len(ids) + frames
    rows = inputs + np.arange(LEVELS)[:, None] * (CODEBOOK_SIZE + 1)
    np.testing.assert_array_equal(sample.arrays["codes"][len(ids) :], rows.T)
    np.testing.assert_array_equal(sample.arrays["code_labels"][len(ids) :], labels.T)
    assert (sample.arrays["codes"][: len(ids)] == -1).all()
    assert (sample.arrays["code_labels"][: len(ids)] == IGNORE_INDEX).all() and (sample.labels == IGNORE_INDEX).all()
    assert not sample.causal and sample.seconds == frames / FRAME_RATE


@pytest.mark.parametrize("changes", [{}, {"condition_dropout": 0.9}, {"mask_ratio": (1.0, 1.0)}, {"pinyin": 1.0}])
def test_samples_are_those_of_the_package_with_the_same_numbers(changes: dict) -> None:
    settings, arrays = masked(**changes), recordings(60)
    source = source_of(settings, arrays)
    for epoch in (0, 3):
        positions = source.lengths(epoch).positions
        for index in range(60):
            sample = source.sample(index, epoch)
            assert_equals_replay(sample, settings, replayed(settings, arrays, index, epoch))
            assert positions[index] == len(sample.input_ids) <= source.longest[index]


def test_epochs_and_sources_draw_differently_and_repeat_themselves() -> None:
    settings, arrays = masked(), recordings(1, rich=False, frames=(200, 201))
    labels = [
        source_of(settings, arrays, number).sample(0, epoch) for number, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    first, later, other, again = (sample.arrays["code_labels"][-200:].tolist() for sample in labels)
    assert first == again and first != later and first != other


def test_a_sample_that_is_too_long_is_left_out_of_the_epoch() -> None:
    settings, arrays = masked(max_seq_len=40), recordings(200)
    source = source_of(settings, arrays)
    lengths = source.lengths(0)
    assert 0 < lengths.left_out < 200 and lengths.left_out == np.count_nonzero(lengths.positions == 0)
    assert lengths.positions.max() <= 40 and source.longest.max() <= 40
    for index in range(0, 200, 7):
        assert len(source.sample(index, 0).input_ids) == lengths.positions[index]


def test_the_settings_arrive_on_other_ranks_as_they_are() -> None:
    settings = masked(max_seq_len=77)
    assert MaskedCodes.of(json.loads(json.dumps(settings.stored()))) == settings
    assert settings.fingerprint != masked().fingerprint


def shares(count: int = 20_000, **changes):
    """What is drawn for recordings that have everything but a noisy prompt."""
    ones = np.ones(count, np.int32)
    facts = SpokenFacts(5 * ones, 5 * ones, ones, 2 * ones, 1000 * ones, -ones, 0 * ones, 40_000 * ones)
    uniform = generator(Purpose.CODE_CHOICES, 1, 0).random((count, 16))
    return draw_choices(uniform, facts, masked(**changes))


def assert_share(found: np.ndarray, expected: float) -> None:
    error = math.sqrt(expected * (1 - expected) / len(found))
    assert abs(found.mean() - expected) <= 4 * error


def test_shares_of_what_is_told() -> None:
    draws = shares(condition_dropout=0.2, language=0.7, instruct=0.6, only_instruct=0.4, pinyin=0.35)
    assert_share(draws.drop, 0.2)
    assert_share(draws.tells_language, 0.8 * 0.7)
    assert_share(draws.tells_instruct, 0.8 * 0.6)
    assert_share(draws.says_pinyin, 0.35)
    assert not (draws.drop & (draws.tells_language | draws.tells_instruct | (draws.prompt > 0))).any()
    assert_share(draws.prompt[draws.tells_instruct] == 0, 0.4 + 0.6 * (1 / 300))  # shares below 1/1000 give no frame


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.25, 0.5), (1.0, 1.0)])
def test_ratios_lie_between_their_bounds(low: float, high: float) -> None:
    draws = shares(mask_ratio=(low, high), prompt_ratio=(low, high), condition_dropout=0.0, instruct=0.0)
    error = 4 * (high - low) / math.sqrt(12 * len(draws.mask_ratio))
    assert abs(draws.mask_ratio.mean() - (low + high) / 2) <= error + 1e-12
    assert low <= draws.mask_ratio.min() and draws.mask_ratio.max() <= high
    assert int(1000 * low) <= draws.prompt.min() and draws.prompt.max() <= 1000 * high
    assert abs(draws.prompt.mean() / 1000 - (low + high) / 2) <= error + 0.001


def test_never_and_always() -> None:
    never = shares(condition_dropout=0.0, language=0.0, instruct=0.0, pinyin=0.0)
    assert not (never.drop | never.tells_language | never.tells_instruct | never.says_pinyin).any()
    always = shares(condition_dropout=0.0, language=1.0, instruct=1.0, only_instruct=1.0, pinyin=1.0)
    assert (always.tells_language & always.tells_instruct & always.says_pinyin & (always.prompt == 0)).all()
    assert shares(condition_dropout=1.0).drop.all()


def test_a_share_of_the_codes_is_masked_behind_the_prompt() -> None:
    settings = masked(
        mask_ratio=(0.3, 0.3), prompt_ratio=(0.5, 0.5), condition_dropout=0.0, instruct=0.0, max_seq_len=9999
    )
    arrays = recordings(1, rich=False, frames=(4000, 4001))
    labels = source_of(settings, arrays).sample(0, 0).arrays["code_labels"][-4000:]
    assert (labels[:2000] == IGNORE_INDEX).all()
    assert_share((labels[2000:] != IGNORE_INDEX).ravel(), 0.3)
