"""Steps over recordings as codes: packs, seconds, speakers, durations, resuming, ranks, workers and what is sent."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.drawing import Drawing
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import ArrayMessage, deserialize_index, prefetch, serialize_index
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.errors import DataError
from tests.data.coded_recordings import FRAME_RATE, LEVELS, ar_nar, dataset, masked, recordings

OPTIONS: dict[str, Any] = {
    "max_seq_len": 200, "packing": True, "greedy": True, "window": 40, "batch_size": 2, "accumulation": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed in order": {"greedy": False, "shuffle": False},
    "one a row": {"packing": False},
    "by length": {"packing": False, "batch_tokens": 400},
    "by seconds": {"packing": False, "batch_seconds": 4.0},
    "speakers": {"by_speaker": True},
    "speakers by seconds": {"by_speaker": True, "packing": False, "batch_seconds": 4.0},
    "short ones first": {"sorted_first": True, "by_duration": True},
}
DRAWINGS: dict[str, Drawing] = {"masked": masked(), "ar_nar": ar_nar()}


@pytest.fixture(params=DRAWINGS)
def speech(request: pytest.FixtureRequest) -> Dataset:
    """Two sources of recordings, drawn in either way."""
    return dataset(DRAWINGS[request.param], recordings(30), recordings(15, seed=1, speakers=2))


def values_of(batches: list[Batch]) -> list[Any]:
    return [(batch.samples, {name: array.tolist() for name, array in batch.arrays.items()}) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_any_ranks_and_workers_read_the_same(kind: str, speech: Dataset) -> None:
    options = {**OPTIONS, **KINDS[kind]}
    plan = StepPlan(speech, **options)
    start = plan.steps_in_epoch(0) + 1  # in the middle of the second epoch
    steps = list(islice(prefetch(plan, 0, 0), start + 3))
    resumed = list(islice(prefetch(StepPlan(speech, **options), start, 3), 3))
    assert [values_of(step) for step in resumed] == [values_of(step) for step in steps[start:]]
    ranks = [StepPlan(speech, **{**options, "accumulation": 1}, dp_rank=rank, dp_world_size=2) for rank in (0, 1)]
    spread = [batch for rank in ranks for batch in rank.micro_batches(start) if any(batch.samples)]
    expected = [batch for batch in steps[start] if any(batch.samples)]
    assert sorted(values_of(spread), key=repr) == sorted(values_of(expected), key=repr)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_the_samples_of_their_epoch(kind: str, speech: Dataset) -> None:
    plan = StepPlan(speech, **{**OPTIONS, **KINDS[kind]})
    first = plan.steps_in_epoch(0)
    for epoch, step in ((0, 0), (1, first)):
        for batch in plan.micro_batches(step):
            view = batch.codes_view
            assert view is not None and batch.startend_row_indices.shape[-1] == 2
            assert view.codes.shape == (*batch.shape, LEVELS)
            assert (view.part is not None) == isinstance(speech.drawing, ArNarCodes)
            for row, members in enumerate(batch.samples):
                end = 0
                for index in members:
                    sample = speech.sample(index, epoch)
                    start, end = end, end + len(sample.input_ids)
                    assert view.codes[row, start:end].tolist() == sample.arrays["codes"].tolist()
                    assert view.labels[row, start:end].tolist() == sample.arrays["code_labels"].tolist()
                    seen = batch.startend_row_indices[row, 0, start:end, 1]
                    assert seen.tolist() == (list(range(start, end)) if sample.causal else [start] * (end - start))
                assert (view.labels[row, end:] == IGNORE_INDEX).all()
            members = [speech.sample(index, epoch) for row in batch.samples for index in row]
            assert batch.seconds == pytest.approx(sum(sample.seconds for sample in members))


def test_a_rank_that_opens_no_file_plans_the_same_steps(speech: Dataset) -> None:
    message = serialize_index(speech)
    index = deserialize_index(ArrayMessage(json.loads(json.dumps(message.metadata)), message.arrays))
    assert index.drawing == speech.drawing and index.varies
    for options in (OPTIONS, {**OPTIONS, **KINDS["speakers by seconds"]}):
        for epoch in (0, 5):
            assert index.lengths_in(epoch).tolist() == speech.lengths_in(epoch).tolist()
            packs = StepPlan(index, **options).packs(epoch)
            assert packs.members.tolist() == StepPlan(speech, **options).packs(epoch).members.tolist()
        assert StepPlan(index, **options).describe(-1, 2) == StepPlan(speech, **options).describe(-1, 2)
    padding = StepPlan(index, **OPTIONS).padding()
    assert padding.arrays.keys() == StepPlan(speech, **OPTIONS).micro_batches(0)[0].arrays.keys()
    assert padding.arrays["codes"].shape == (1, 1, LEVELS)


def test_similar_prompts_are_known_to_ranks_without_files() -> None:
    settings = ar_nar(prompt_sources=(0.0, 1.0, 0.0))
    speech = dataset(settings, recordings(30))
    message = serialize_index(speech)
    index = deserialize_index(ArrayMessage(json.loads(json.dumps(message.metadata)), message.arrays))
    assert index.lengths_in(2).tolist() == speech.lengths_in(2).tolist()


def test_an_evaluation_reads_the_same_samples_each_time(speech: Dataset) -> None:
    options = {name: OPTIONS[name] for name in ("max_seq_len", "packing", "greedy", "window", "batch_size")}
    plan = EvaluationPlan(speech, **options)
    steps = [values_of([batch]) for _, batch in plan.local_steps(plan.steps_in_epoch(0))]
    assert steps == [values_of([batch]) for _, batch in plan.local_steps(plan.steps_in_epoch(0))]
    assert sum(len(row) for step in steps for samples, *_ in step for row in samples) == 45


@pytest.mark.parametrize("kind", ["packed", "one a row", "by seconds"])
def test_every_speaker_is_heard_equally_often(kind: str) -> None:
    speech = dataset(masked(), recordings(37, speakers=4), recordings(5, seed=1, speakers=2))
    plan = StepPlan(speech, **{**OPTIONS, **KINDS[kind]}, by_speaker=True)
    seen: list[int] = []
    for epoch in range(3):
        members = plan.packs(epoch).members
        speakers = speech.speaker_of[members]
        assert np.bincount(speakers).tolist() == [-(-42 // 4)] * 4  # names 0 and 1 are in both sources
        seen += members.tolist()
    assert set(seen) == set(range(42))
    assert "every speaker equally often" in plan.describe()
    assert plan.packs(0).members.tolist() != plan.packs(1).members.tolist()


def test_the_first_epoch_goes_from_short_to_long_recordings(speech: Dataset) -> None:
    plan = StepPlan(speech, **{**OPTIONS, "packing": False}, sorted_first=True, by_duration=True)
    milliseconds = [speech.milliseconds[plan.packs(epoch).members] for epoch in (0, 1)]
    assert (np.diff(milliseconds[0]) >= 0).all() and not (np.diff(milliseconds[1]) >= 0).all()


@pytest.mark.parametrize("first", [{}, {"sorted_first": True, "by_duration": True}])
def test_micro_batches_hold_no_more_seconds_than_allowed(speech: Dataset, first: dict) -> None:
    plan = StepPlan(speech, **{**OPTIONS, "packing": False}, batch_seconds=4.0, max_batch_samples=8, **first)
    for epoch in (0, 1):
        sizes = []
        for pack in plan.packs(epoch):
            milliseconds = speech.milliseconds[pack]
            assert len(pack) * milliseconds.max() <= 4000 and len(pack) <= 8
            sizes.append(len(pack))
        assert max(sizes) > 2 and sum(sizes) == 45
    for batch in plan.micro_batches(0):
        assert len(batch.samples) == batch.shape[0] and all(len(row) == 1 for row in batch.samples)
    assert "of at most 4 seconds (of similar duration" in plan.describe()


def test_recordings_longer_than_a_batch_are_left_out_and_told() -> None:
    speech = dataset(masked(), recordings(60))
    plan = StepPlan(speech, **{**OPTIONS, "packing": False}, batch_seconds=1.0)
    longer = int((speech.milliseconds > 1000).sum())
    assert f"left out: {longer} recordings longer than batch_seconds 1\n" in plan.describe() and 0 < longer < 60
    assert len(plan.packs(0).members) == 60 - longer
    with pytest.raises(DataError, match=r"all are longer than batch_seconds 0\.1"):
        StepPlan(speech, **{**OPTIONS, "packing": False}, batch_seconds=0.1).describe()


def test_what_is_too_long_in_an_epoch_is_left_out_and_told() -> None:
    speech = dataset(ar_nar(max_seq_len=60), recordings(60))
    plan = StepPlan(speech, **{**OPTIONS, "max_seq_len": 60})
    left_out = int((speech.lengths_in(0) == 0).sum())
    assert f"epoch 0: of the samples that came out longer than max_seq_len, {left_out} left out" in plan.describe()
    assert len(plan.packs(0).members) == 60 - left_out and 0 < left_out < 60


def test_a_batch_says_how_much_sound_it_holds() -> None:
    speech = dataset(masked(), recordings(8))
    batch = StepPlan(speech, **{**OPTIONS, "packing": False}, batch_seconds=100.0).micro_batches(0)[0]
    assert batch.audio_seconds == pytest.approx(speech.milliseconds.sum() / 1000, abs=8 / FRAME_RATE)
