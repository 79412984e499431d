"""Samples that are written level by level: sequences built a second time by hand, shares of draws, independence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from erniekit.data.ar_nar_codes import TASKS, ArNarCodes
from erniekit.data.batch import CodePart
from erniekit.data.code_reader import CodeReader
from erniekit.data.drawing import SpokenFacts
from erniekit.data.mixing import Purpose, generator
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.data.token_cache import TokenArrays
from tests.data.coded_recordings import (
    CODEBOOK_SIZE,
    FRAME_RATE,
    LEVELS,
    PROMPT_ROWS,
    WHOLE_ROWS,
    WRITTEN_ROW,
    ar_nar,
    recordings,
)

SEPARATOR, STOP = 10, CODEBOOK_SIZE


def source_of(settings: ArNarCodes, arrays: TokenArrays, number: int = 0):
    return settings.source(arrays, number, CodeReader(arrays))


class Sequence:
    """A sample as plain lists, a position at a time."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.codes: list[list[int]] = []
        self.positions: list[int] = []
        self.labels: dict[int, int] = {}
        self.code_labels: dict[tuple[int, int], int] = {}
        self.parts: dict[int, CodePart] = {}

    def token(self, token: int) -> None:
        self.ids.append(token)
        self.codes.append([])

    def frame(self, rows: list[int]) -> None:
        self.ids.append(0)
        self.codes.append(rows)

    @property
    def next(self) -> int:
        return len(self.ids)


def weighted(weights: tuple[float, ...], uniform: float) -> int:
    total, below = sum(weights), 0.0
    for number, weight in enumerate(weights):
        below += weight / total
        if uniform < below:
            return number
    raise AssertionError(uniform)


def by_hand(settings: ArNarCodes, arrays: TokenArrays, index: int, epoch: int) -> tuple[Sequence, bool]:
    """The sample of a recording, written from the description of the method."""
    reader, facts = CodeReader(arrays), SpokenFacts.of(arrays.spoken)
    n = len(arrays.lines)
    u = generator(Purpose.CODE_CHOICES, settings.seed, epoch, 0).random((n, 16))[index]
    mates = [other for other in range(n) if facts.speaker[other] == facts.speaker[index] and other != index]
    task = settings.tasks[int(u[0] * len(settings.tasks))]
    level = weighted(settings.level_weights, u[1])
    if task == "continuation" and not mates:
        task = "tts"
    text = reader.texts(index)[0].tolist()
    language = reader.texts(index)[2].tolist()
    tells = bool(language) and u[6] < settings.language
    drops = task != "stt" and u[4] < settings.condition_dropout
    own, response = reader.codes(index).tolist(), reader.codes(index).tolist()
    prompt: list[list[int]] = [[] for _ in range(settings.levels)]
    if task == "continuation":
        other = mates[int(u[7] * len(mates))]
        text = [*text, *settings.space, *reader.texts(other)[0].tolist()]
        prompt, response = own, reader.codes(other).tolist()
    elif task == "tts" and not u[5] < settings.prompt_dropout:
        low, high = settings.prompt_seconds
        missing = max(1, int((low + (high - low) * u[2]) * FRAME_RATE))
        origin = weighted(settings.prompt_sources, u[3])
        for number in range(settings.prompt_utterances):
            which, where = u[7 + 2 * number], u[8 + 2 * number]
            if origin == 2:
                chosen = index if number == 0 else None
            else:
                chosen = mates[int(which * len(mates))] if mates else None
            if chosen is None or not missing:
                continue
            codes = reader.codes(chosen)
            taken = min(missing, codes.shape[1])
            begin = int(where * (codes.shape[1] - taken + 1))
            prompt = [have + more for have, more in zip(prompt, codes[:, begin : begin + taken].tolist(), strict=True)]
            missing -= taken
    if drops:
        text, prompt = [], [[] for _ in range(settings.levels)]
    made = Sequence()

    def separator() -> None:
        made.token(SEPARATOR)

    def say(tokens: list[int]) -> None:
        for token in tokens:
            made.token(token)

    def say_language() -> None:
        if tells:
            say([19, *language, 20])
            separator()

    if task == "stt":
        for t in range(len(own[0])):
            made.frame([WRITTEN_ROW + own[0][t], *(WHOLE_ROWS[k] + own[k][t] for k in range(1, settings.levels - 1))])
        separator()
        say_language()
        say([settings.level_ids[0]])
        separator()
        said = [17, *text, 18]
        for offset, token in enumerate(said):
            made.labels[made.next - 1 + offset] = token
            made.parts[made.next - 1 + offset] = CodePart.TRANSCRIPT
        say(said[:-1])
        return made, True
    if settings.text_loss and level == 0 and not drops:
        for place, token in enumerate([*text, 18]):
            made.labels[place] = token
            made.parts[place] = CodePart.TEXT
    say([17, *text, 18])
    separator()
    say_language()
    say([settings.level_ids[level]])
    separator()
    if prompt[0]:
        for t in range(len(prompt[0])):
            if settings.prompt_loss and level == 0 and t + 1 < len(prompt[0]):
                made.code_labels[made.next, 0] = prompt[0][t + 1]
                made.parts[made.next] = CodePart.PROMPT
            made.frame([PROMPT_ROWS[k] + prompt[k][t] for k in range(max(1, level))])
        if task == "continuation":
            made.token(15)
        separator()
    for t in range(len(response[0])):
        if level:
            made.code_labels[made.next, level] = response[level][t]
            made.parts[made.next] = CodePart.RESPONSE
            made.frame([WHOLE_ROWS[k] + response[k][t] for k in range(level)])
        else:
            made.code_labels[made.next - 1, 0] = response[0][t]
            made.parts[made.next - 1] = CodePart.RESPONSE
            made.frame([WRITTEN_ROW + response[0][t]])
    if level == 0:
        made.code_labels[made.next - 1, 0] = STOP
        made.parts[made.next - 1] = CodePart.RESPONSE
    return made, level == 0 or not settings.both_ways


def assert_equal(sample: Sample, made: Sequence, causal: bool) -> None:
    assert sample.input_ids.tolist() == made.ids
    found = [[row for row in rows if row >= 0] for rows in sample.arrays["codes"].tolist()]
    assert found == made.codes
    labels = {place: token for place, token in enumerate(sample.labels.tolist()) if token != IGNORE_INDEX}
    assert labels == made.labels
    places = np.argwhere(sample.arrays["code_labels"] != IGNORE_INDEX)
    assert {(p, level): int(sample.arrays["code_labels"][p, level]) for p, level in places.tolist()} == made.code_labels
    parts = {place: part for place, part in enumerate(sample.arrays["code_part"].tolist()) if part}
    assert parts == made.parts
    assert sample.causal == causal


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"both_ways": False, "text_loss": False, "prompt_loss": False},
        {"condition_dropout": 0.6, "prompt_dropout": 0.0, "prompt_utterances": 4},
        {"tasks": ("stt",), "language": 1.0},
        {"tasks": ("continuation",)},
        {"tasks": ("tts",), "prompt_sources": (0.0, 0.0, 1.0)},
    ],
)
@pytest.mark.parametrize("speakers", [3, 40])
def test_sequences_are_those_of_the_description(changes: dict, speakers: int) -> None:
    settings, arrays = ar_nar(**changes), recordings(50, speakers=speakers)
    source = source_of(settings, arrays)
    for epoch in (0, 2):
        positions = source.lengths(epoch).positions
        for index in range(50):
            sample = source.sample(index, epoch)
            assert_equal(sample, *by_hand(settings, arrays, index, epoch))
            assert positions[index] == len(sample.input_ids) <= source.longest[index]


def test_positions_restart_at_each_segment_with_its_separator() -> None:
    arrays = recordings(20)
    source = source_of(ar_nar(restarts_positions=True), arrays)
    for index in range(20):
        sample = source.sample(index, 0)
        places = np.flatnonzero(sample.input_ids == SEPARATOR)
        lengths = np.diff([-1, *places, len(sample.input_ids) - 1])
        expected = [place for length in lengths.tolist() for place in range(length)]
        assert sample.arrays["position_ids"].tolist() == expected
    assert "position_ids" not in source_of(ar_nar(), arrays).sample(0, 0).arrays


def test_codes_of_one_level_are_always_written_one_after_another() -> None:
    rows = {"prompt_rows": (0,), "written_row": 16, "whole_rows": ()}
    settings = ar_nar(levels=1, level_weights=(1.0,), level_ids=(11,), **rows)
    source = source_of(settings, recordings(30, levels=1))
    for index in range(30):
        sample = source.sample(index, 0)
        assert sample.causal and sample.arrays["codes"].shape[1] == 1 and sample.arrays["codes"].max() < 33


def test_most_similar_utterances_are_prompts() -> None:
    settings = ar_nar(
        tasks=("tts",), prompt_sources=(0.0, 1.0, 0.0), prompt_utterances=1, condition_dropout=0.0, prompt_dropout=0.0,
        prompt_seconds=(100.0, 100.0), level_weights=(0.0, 1.0, 0.0, 0.0),
    )  # fmt: skip
    arrays = recordings(12, speakers=3)
    arrays.metadata["most_similar"] = [(index + 3) % 12 for index in range(12)]
    source, reader = source_of(settings, arrays), CodeReader(arrays)
    for index in range(12):
        codes = source.sample(index, 0).arrays["codes"]
        prompt = codes[(codes[:, 0] >= 0) & (codes[:, 0] < 16), 0]
        assert prompt.tolist() == reader.codes((index + 3) % 12)[0].tolist()


def test_a_sample_that_is_too_long_is_left_out_of_the_epoch() -> None:
    source = source_of(ar_nar(max_seq_len=50), recordings(200))
    lengths = source.lengths(1)
    assert 0 < lengths.left_out < 200 and lengths.positions.max() <= 50 and source.longest.max() <= 50
    for index in range(0, 200, 7):
        assert len(source.sample(index, 1).input_ids) == lengths.positions[index]


def test_the_settings_arrive_on_other_ranks_as_they_are() -> None:
    settings = ar_nar(max_seq_len=77)
    assert ArNarCodes.of(json.loads(json.dumps(settings.stored()))) == settings
    assert settings.fingerprint != ar_nar().fingerprint


def draws_of(count: int = 20_000, **changes: Any):
    """What is drawn for short recordings by speakers with five each, which have a language."""
    spoken = np.zeros((count, 12), np.int32)
    spoken[:, 0], spoken[:, 2], spoken[:, 4], spoken[:, 5] = 3, 1, 200, -1
    spoken[:, 6] = np.arange(count) // 5
    empty = np.empty(0, np.int32)
    arrays = TokenArrays(empty, empty, empty, np.zeros(count, np.int32), {}, spoken=spoken.ravel())
    return ar_nar(**changes).source(arrays, 0, None)._draws(0, count, 0)


def assert_share(found: np.ndarray, expected: float) -> None:
    error = math.sqrt(expected * (1 - expected) / len(found))
    assert abs(found.mean() - expected) <= 4 * error


def test_shares_of_what_is_drawn() -> None:
    draws = draws_of(condition_dropout=0.2, prompt_dropout=0.3, language=0.7)
    for task, share in zip(TASKS, (0.5, 0.25, 0.25), strict=True):
        assert_share(draws.task == TASKS.index(task), share)
    assert_share(draws.tells_language, 0.7)
    spoken = ~draws.transcribes
    assert_share(~draws.has_text[spoken], 0.2)
    has_prompt = draws.prompts.frames.sum(axis=1) > 0
    assert_share(has_prompt[spoken & ~draws.continues], 0.8 * 0.7)
    assert_share(has_prompt[draws.continues], 0.8)
    assert not has_prompt[draws.transcribes].any() and not has_prompt[~draws.has_text].any()


@pytest.mark.parametrize("weights", [(4.0, 2.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (0.0, 1.0, 0.0, 3.0)])
def test_levels_come_as_their_weights_say(weights: tuple[float, ...]) -> None:
    level = draws_of(tasks=("tts",), level_weights=weights).level
    counts, expected = np.bincount(level, minlength=LEVELS), len(level) * np.array(weights) / sum(weights)
    assert (counts[expected == 0] == 0).all()
    there = expected > 0
    assert ((counts - expected)[there] ** 2 / expected[there]).sum() < 20  # 3 degrees of freedom: p = 0.0002


def test_prompts_have_their_lengths_and_sources() -> None:
    changes = {"tasks": ("tts",), "condition_dropout": 0.0, "prompt_dropout": 0.0, "prompt_utterances": 1}
    draws = draws_of(**changes, prompt_seconds=(1.0, 3.0), prompt_sources=(0.75, 0.0, 0.25))
    records = np.arange(len(draws.task))
    record, begin, frames = (values[:, 0] for values in draws.prompts)
    assert frames.min() == 25 and frames.max() == 74 and abs(frames.mean() - 49.5) < 0.5
    assert (begin + frames <= 200).all() and begin.max() > 100
    assert_share(record == records, 0.25)
    assert (record // 5 == records // 5).all()
    others = (record - records)[record != records] % 5  # all of the speaker's other recordings, equally often
    for step in (1, 2, 3, 4):
        assert_share(others == step, 0.25)


def test_as_many_utterances_are_joined_as_it_takes() -> None:
    changes = {"tasks": ("tts",), "condition_dropout": 0.0, "prompt_dropout": 0.0, "prompt_sources": (1.0, 0.0, 0.0)}
    for utterances, frames in ((1, 200), (2, 400), (4, 500)):
        prompts = draws_of(100, **changes, prompt_seconds=(20.0, 20.0), prompt_utterances=utterances).prompts
        assert (prompts.frames.sum(axis=1) == frames).all()
        assert (np.count_nonzero(prompts.frames, axis=1) == math.ceil(frames / 200)).all()
