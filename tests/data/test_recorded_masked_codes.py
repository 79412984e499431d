"""Our samples of masked codes are those of the omnivoice package; tools/parity/record_masked_codes.py."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.data import masked_codes
from erniekit.data.code_reader import CodeReader, SpeechFacts
from erniekit.data.masked_codes import MaskedCodes, StyleTokens
from erniekit.data.mixing import Purpose
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.data.token_cache import TokenArrays
from tests.data.masked_code_cases import (
    CODES,
    LEVELS,
    RECORDED,
    RECORDS,
    RUNS,
    SPECIAL_TOKENS,
    TIMES,
    choices_of,
    codes_of,
    ids_of,
    masks_of,
)

STYLE = StyleTokens(*((1 + number,) for number in range(len(SPECIAL_TOKENS))), none=tuple(ids_of("None")))
FRAME_RATE = 25.0


def recordings() -> TokenArrays:
    """The records as the token cache holds them."""
    ids, codes, spoken = [], [], []
    for number, record in enumerate(RECORDS):
        texts = [ids_of(record.get(name, "")) for name in ("text", "text_pinyin", "language_id", "instruct")]
        ids += [token for text in texts for token in text]
        codes.append(codes_of(number))
        frames = codes[-1].shape[1]
        sizes, clean_start = [len(text) for text in texts], record.get("clean_start_token_idx", -1)
        spoken.append([*sizes, frames, clean_start, number, -1, 0, 0, 0, round(1000 * frames / FRAME_RATE)])
    table = np.array(spoken, np.int32)
    facts = SpeechFacts(
        levels=LEVELS, codebook_size=CODES, frame_rate=FRAME_RATE, digest="",
        speakers=tuple(map(str, range(len(RECORDS)))), alone=0, seconds=1.0, files=(), similar=(),
    )  # fmt: skip
    return TokenArrays(
        np.array(ids, np.int32),
        np.empty(0, np.int32),
        np.concatenate(([0], np.cumsum(table[:, :4].sum(axis=1)))),
        np.arange(1, len(RECORDS) + 1, dtype=np.int32),
        {**facts.metadata(), "counts": {}, "unused_fields": []},
        spoken=table.ravel(),
        codes=np.concatenate([each.ravel() for each in codes]).astype(np.uint16),
        code_offsets=np.concatenate(([0], np.cumsum([each.size for each in codes]))),
    )


@pytest.mark.parametrize("name", RUNS)
def test_samples_are_those_that_the_package_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is the epoch."""
    streams = {
        (purpose, time): numbers
        for time in range(TIMES)
        for purpose, numbers in (
            (Purpose.CODE_CHOICES, choices_of(time).ravel()),
            (Purpose.CODE_MASKS, np.concatenate([masks_of(time, number).ravel() for number in range(len(RECORDS))])),
        )
    }

    def replayed(purpose: Purpose, seed: int, epoch: int, number: int, first: int, count: int) -> np.ndarray:
        return streams[purpose, epoch][first : first + count]

    monkeypatch.setattr(masked_codes, "uniforms", replayed)
    settings = MaskedCodes(
        levels=LEVELS, codebook_size=CODES, mask_id=CODES, frame_rate=FRAME_RATE, seed=0, tokens=tuple(STYLE),
        max_seq_len=1000, **RUNS[name],
    )  # fmt: skip
    arrays = recordings()
    source = settings.source(arrays, 0, CodeReader(arrays))
    rows = np.arange(LEVELS) * (CODES + 1)
    with np.load(RECORDED) as file:
        recorded = dict(file)
    for time in range(TIMES):
        for number in range(len(RECORDS)):
            key = f"{name}/{time}/{number}"
            ids, labels, first = (recorded[f"{key}/{of}"] for of in ("ids", "labels", "first"))
            sample = source.sample(number, time)
            np.testing.assert_array_equal(sample.input_ids[:first], ids[0, :first], err_msg=key)
            np.testing.assert_array_equal(sample.arrays["codes"][first:] - rows, ids[:, first:].T, err_msg=key)
            assert (sample.arrays["codes"][:first] == -1).all() and len(sample.input_ids) == ids.shape[1], key
            np.testing.assert_array_equal(sample.arrays["code_labels"], labels.T, err_msg=key)
            assert (sample.labels == IGNORE_INDEX).all()


def test_the_recorded_samples_have_every_kind() -> None:
    """Dropped ones, unmasked beginnings, and codes that are masked and not."""
    with np.load(RECORDED) as file:
        firsts = [int(file[name]) for name in file.files if name.endswith("/first")]
        masked = [float((file[name] == CODES).mean()) for name in file.files if name.endswith("/ids")]
    assert len(firsts) == len(RUNS) * TIMES * len(RECORDS)
    assert 0.1 < np.mean(np.array(firsts) == 0) < 0.6 and len(set(np.round(masked, 2))) > 20
