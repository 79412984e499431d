"""From a configuration of stage TTS to drawn samples: which records are read, and how."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.data import evaluation_dataset, training_dataset, training_plan
from erniekit.build.model import open_tokenizer
from erniekit.config import Config
from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.dataset import Dataset
from erniekit.data.loader import prefetch
from erniekit.data.masked_codes import MaskedCodes
from erniekit.errors import DataError
from tests.build.test_speech import write_codes
from tests.data.speech_records import (
    CODEBOOK_SIZE,
    COUNT,
    FRAME_RATE,
    LEVELS,
    speech_records,
    write_code_shards,
    write_codes_jsonl,
)

OpenData = Callable[..., Dataset]


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    folder = write_codes(tmp_path / "codes", levels=LEVELS, codebook_size=CODEBOOK_SIZE, frame_rate=FRAME_RATE)
    return write_code_shards(folder)


@pytest.fixture
def speech(make_config: Callable[..., Config], codes: Path, tmp_path: Path) -> Callable[..., Config]:
    def make(**values: Any) -> Config:
        stage = {"stage": "TTS", "train_dataset_path": str(codes), "train_dataset_type": "codes"}
        return make_config(**{**stage, "data_cache_dir": str(tmp_path / "cache"), **values})

    return make


@pytest.fixture
def opened(speech: Callable[..., Config]) -> OpenData:
    def make(**values: Any) -> Dataset:
        config = speech(**values)
        return training_dataset(config, open_tokenizer(config)[0], None)

    return make


def text_lengths(dataset: Dataset) -> list[int]:
    return dataset.source_arrays[0].spoken.reshape(-1, 12)[:, 0].tolist()


@pytest.mark.parametrize("objective", ["masked", "ar_nar"])
def test_shards_become_samples_of_the_objective(objective: str, opened: OpenData) -> None:
    dataset = opened(tts_objective=objective)
    assert isinstance(dataset.drawing, MaskedCodes if objective == "masked" else ArNarCodes)
    assert len(dataset) == COUNT and dataset.levels == LEVELS
    for index in range(COUNT):
        sample = dataset.sample(index, 1)
        assert len(sample.input_ids) == dataset.lengths_in(1)[index]
        assert sample.arrays["codes"].shape == (len(sample.input_ids), LEVELS)
    assert "3 named speakers" in str(dataset.report)


@pytest.mark.proves("text_frontend")
def test_the_frontend_makes_the_ids_of_a_text(opened: OpenData) -> None:
    tokens = text_lengths(opened())
    characters = text_lengths(opened(text_frontend="characters"))
    assert characters == [len(record["text"]) for record in speech_records()]
    assert all(few < many for few, many in zip(tokens, characters, strict=True))


@pytest.mark.proves("duration_range")
def test_recordings_of_other_durations_are_left_out(opened: OpenData) -> None:
    assert opened(duration_range="0.8,1.2").milliseconds.tolist() == [800, 900, 1000, 1100, 1200]


def test_records_may_lack_a_text_only_where_none_is_read(opened: OpenData, codes: Path) -> None:
    silent = [record | {"text": ""} for record in speech_records()]
    path = str(write_codes_jsonl(codes / "silent.jsonl", silent))
    with pytest.raises(DataError, match=r"silent\.jsonl:1: text: expected what is said"):
        opened(train_dataset_path=path)
    assert len(opened(train_dataset_path=path, condition_dropout=1.0)) == COUNT


def test_records_are_held_out_of_shards(speech: Callable[..., Config]) -> None:
    config = speech(eval_split=0.25, do_eval=True)
    tokenizer = open_tokenizer(config)[0]
    held_out, trained = evaluation_dataset(config, tokenizer, None), training_dataset(config, tokenizer, None)
    assert (len(held_out), len(trained)) == (3, 9)
    assert {*held_out.milliseconds.tolist()}.isdisjoint(trained.milliseconds.tolist())


def test_every_sample_of_an_epoch_is_in_a_step(speech: Callable[..., Config], opened: OpenData) -> None:
    for values in ({"packing": True}, {"packing": False}, {"packing": False, "batch_seconds": 4}):
        plan = training_plan(speech(**values), opened(**values))
        steps = range(plan.steps_in_epoch(0))
        seen = [index for step in steps for batch in plan.micro_batches(step) for row in batch.samples for index in row]
        assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_cut_meanwhile_ends_the_run_with_its_name(
    workers: int, speech: Callable[..., Config], opened: OpenData, codes: Path
) -> None:
    values = {"packing": False, "per_device_train_batch_size": 1, "random_shuffle": False}
    steps = prefetch(training_plan(speech(**values), opened(**values)), 0, workers)
    next(steps)
    os.truncate(codes / "audios" / "s1.tar", 1500)
    with pytest.raises(DataError, match=r"s1\.tar: expected the shard as it was .* got 1,500 bytes"):
        for _ in range(COUNT):
            next(steps)
