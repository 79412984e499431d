"""Speakers: an order in which each is heard equally often, the most similar recording, and recordings alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.code_reader import CodeReader
from erniekit.data.speakers import MOST_SIMILAR, groups, lone_recordings, most_similar, speaker_order
from erniekit.data.tokenizers.tokenizer import Tokenizer
from tests.data.speech_records import open_speech, speech_records, write_codes_jsonl

SPEAKERS = np.array([0, 0, 0, 1, 0, 2, 0, 2, -1, 0, -1])  # six, one, two, and two alone


def test_recordings_of_a_speaker_are_a_group_and_those_of_nobody_are_alone() -> None:
    found = [group.tolist() for group in groups(SPEAKERS)]
    assert found == [[8], [10], [0, 1, 2, 4, 6, 9], [3], [5, 7]]
    assert lone_recordings(SPEAKERS.tolist()) == 3 and lone_recordings([]) == 0 and not list(groups(SPEAKERS[:0]))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_speaker_is_heard_equally_often_and_no_sample_is_forgotten(shuffle: bool) -> None:
    rounds = 3  # ceil(11 / 5)
    heard: Counter[int] = Counter()
    owner = {index: number for number, group in enumerate(groups(SPEAKERS)) for index in group.tolist()}
    for epoch in range(4):
        order = speaker_order(SPEAKERS, seed=5, epoch=epoch, shuffle=shuffle)
        assert len(order) == rounds * 5
        for start in range(0, len(order), 5):  # a round has everybody once
            assert sorted(owner[index] for index in order[start : start + 5].tolist()) == list(range(5))
        heard.update(order.tolist())
        if epoch == 1:  # six places of the first speaker's six recordings
            assert all(heard[index] == 1 for index in (0, 1, 2, 4, 6, 9)) and heard[5] == heard[7] == 3
    assert all(heard[index] == 2 for index in (0, 1, 2, 4, 6, 9))
    assert heard[3] == 12 and heard[5] == heard[7] == 6


def test_the_seed_and_the_epoch_draw_the_order_and_nothing_else_does() -> None:
    first = speaker_order(SPEAKERS, seed=5, epoch=1)
    assert first.tolist() == speaker_order(SPEAKERS, seed=5, epoch=1).tolist()
    assert first.tolist() != speaker_order(SPEAKERS, seed=6, epoch=1).tolist()
    in_order = speaker_order(SPEAKERS, seed=5, epoch=0, shuffle=False)
    assert in_order.tolist() == [0, 3, 5, 8, 10, 1, 3, 7, 8, 10, 2, 3, 5, 8, 10]
    assert speaker_order(SPEAKERS[:0], seed=1, epoch=0).tolist() == []


def test_the_most_similar_recording_has_the_largest_cosine_of_its_speaker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = speech_records()
    records[11]["speaker"] = "dora"
    records[0]["similar"] = ["utt-6"]
    dataset = open_speech(write_codes_jsonl(tmp_path / "a.jsonl", records), tokenizer, tmp_path / "cache")
    arrays = dataset.source_arrays[0]
    counts = [np.bincount(record["codes"][0], minlength=16) for record in records]
    expected = []
    for index, record in enumerate(records):
        cosines = {
            other: counts[index] @ counts[other] / np.linalg.norm(counts[index]) / np.linalg.norm(counts[other])
            for other in range(len(records))
            if other != index and records[other]["speaker"] == record["speaker"]
        }
        expected.append(max(cosines, key=lambda other: round(cosines[other], 5)) if cosines else -1)
    expected[0] = 6
    found = most_similar(arrays, CodeReader(arrays))
    assert found.dtype == np.int32 and found.tolist() == expected and found[11] == -1
    assert arrays.metadata[MOST_SIMILAR] == expected
    assert most_similar(arrays, None).tolist() == expected  # as a rank without data does
