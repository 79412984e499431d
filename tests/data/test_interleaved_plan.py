"""Steps over samples that differ from epoch to epoch: packs, mixtures, resuming, ranks, workers and what is sent."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data.batch import Batch
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import ArrayMessage, deserialize_index, prefetch, serialize_index
from erniekit.data.open_dataset import open_dataset, open_packed_dataset
from erniekit.data.packed import DataFingerprint, write_packed
from erniekit.data.sampler import StepPlan
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import ALIGNED_UNITS
from erniekit.errors import DataError
from tests.data.independent_interleaving import random_alignment
from tests.data.test_interleave import VOCABULARY, interleaving, record_of, unit_tokenizer, write_records

__all__ = ["unit_tokenizer"]
RECORDS, TEXTS, MAX_SEQ_LEN = 50, 30, 2500
PACKED: dict[str, Any] = {
    "max_seq_len": MAX_SEQ_LEN, "packing": True, "greedy": True, "window": 40, "batch_size": 2, "accumulation": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed in order": {"greedy": False, "shuffle": False},
    "one a row": {"packing": False},
    "by length": {"packing": False, "batch_tokens": 6000},
    "curriculum": {"sorted_first": True},
    "mixed": {"strategy": "interleave_over"},
}


@pytest.fixture(scope="module")
def mixture(unit_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Aligned units and plain text."""
    folder = tmp_path_factory.mktemp("mixture")
    texts = folder / "text.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"Winter days are short. {'mill ' * n}"}) + "\n" for n in range(TEXTS))
    )
    aligned = [record_of(*random_alignment(seed, VOCABULARY)) for seed in range(RECORDS)]
    sources = [Source(texts, "text"), Source(write_records(folder / "aligned.jsonl", aligned), ALIGNED_UNITS)]
    settings = interleaving(unit_tokenizer, max_seq_len=MAX_SEQ_LEN)
    return open_dataset(
        sources, unit_tokenizer, None, max_seq_len=MAX_SEQ_LEN, over_length="truncate_turns", cache_dir=folder,
        drawing=settings,
    )  # fmt: skip


def tokens_of(batches: list[Batch]) -> list[Any]:
    return [(batch.samples, batch.input_ids.tolist(), batch.labels.tolist()) for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_every_epoch_has_its_own_samples_in_rows_that_hold_them(kind: str, mixture: Dataset) -> None:
    plan = StepPlan(mixture, **{**PACKED, **KINDS[kind]})
    assert plan.total_steps(-1, 2) == plan.steps_in_epoch(0) + plan.steps_in_epoch(1)
    for epoch in (0, 1):
        first = epoch and plan.steps_in_epoch(0)
        batches = [batch for step in range(plan.steps_in_epoch(epoch)) for batch in plan.micro_batches(first + step)]
        seen = [index for batch in batches for row in batch.samples for index in row]
        assert set(seen) == set(range(TEXTS + RECORDS))
        assert kind == "mixed" or len(seen) == len(set(seen))
        for batch in batches:
            assert batch.input_ids.shape[1] <= MAX_SEQ_LEN
            for row, members in enumerate(batch.samples):
                expected = np.concatenate([mixture.sample(index, epoch).input_ids for index in members])
                assert batch.input_ids[row, : len(expected)].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_any_ranks_and_workers_read_the_same(kind: str, mixture: Dataset) -> None:
    options = {**PACKED, **KINDS[kind]}
    steps = list(islice(prefetch(StepPlan(mixture, **options), 0, 0), 12))
    middle = StepPlan(mixture, **options).steps_in_epoch(0) + 1  # of the second epoch
    assert 2 < middle < 12 or kind == "one a row"
    start = min(middle, 9)
    resumed = list(islice(prefetch(StepPlan(mixture, **options), start, 3), 12 - start))
    assert [tokens_of(step) for step in resumed] == [tokens_of(step) for step in steps[start:]]
    ranks = [StepPlan(mixture, **{**options, "accumulation": 1}, dp_rank=rank, dp_world_size=2) for rank in (0, 1)]
    for number in (start, 10):
        spread = [batch for plan in ranks for batch in plan.micro_batches(number) if any(batch.samples)]
        assert sorted(tokens_of(spread)) == sorted(tokens_of([b for b in steps[number] if any(b.samples)]))


def test_a_rank_that_opens_no_file_plans_the_same_steps(mixture: Dataset) -> None:
    message = serialize_index(mixture)
    index = deserialize_index(ArrayMessage(json.loads(json.dumps(message.metadata)), message.arrays))
    assert index.varies
    for epoch in (0, 5):
        assert index.lengths_in(epoch).tolist() == mixture.lengths_in(epoch).tolist()
        packs = StepPlan(index, **PACKED).packs(epoch)
        assert packs.members.tolist() == StepPlan(mixture, **PACKED).packs(epoch).members.tolist()
    assert str(index.report) == str(mixture.report)
    assert StepPlan(index, **PACKED).describe(-1, 2) == StepPlan(mixture, **PACKED).describe(-1, 2)


def test_an_evaluation_reads_the_same_samples_each_time(mixture: Dataset) -> None:
    options = {name: PACKED[name] for name in ("max_seq_len", "packing", "greedy", "window", "batch_size")}
    plan = EvaluationPlan(mixture, **options)
    steps = [tokens_of([batch]) for _, batch in plan.local_steps(plan.steps_in_epoch(0))]
    assert steps == [tokens_of([batch]) for _, batch in plan.local_steps(plan.steps_in_epoch(0))]
    assert sum(len(row) for step in steps for samples, *_ in step for row in samples) == TEXTS + RECORDS


def test_a_packed_folder_holds_the_first_epoch(mixture: Dataset, tmp_path: Path) -> None:
    fingerprint = DataFingerprint("tokenizer", None, False)
    plan = StepPlan(mixture, **PACKED)
    write_packed(tmp_path / "packed", mixture, plan.packs(0), fingerprint)
    packed = open_packed_dataset(tmp_path / "packed", fingerprint, max_seq_len=MAX_SEQ_LEN, pad_id=mixture.pad_id)
    assert not packed.varies
    for number, index in enumerate(plan.packs(0).members):
        assert packed.sample(number, 3).input_ids.tolist() == mixture.sample(int(index), 0).input_ids.tolist()


def test_what_is_too_long_in_an_epoch_is_left_out_and_told(
    mixture: Dataset, unit_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def limited(source: Source, max_seq_len: int) -> StepPlan:
        settings = interleaving(unit_tokenizer, max_seq_len=max_seq_len, truncates=False)
        dataset = open_dataset(
            [source], unit_tokenizer, None, max_seq_len=max_seq_len, over_length="drop",
            cache_dir=tmp_path, drawing=settings,
        )  # fmt: skip
        return StepPlan(dataset, **{**PACKED, "max_seq_len": max_seq_len})

    plan = limited(mixture.sources[1], 700)
    left_out = (plan.dataset.lengths_in(0) == 0).sum()
    assert f"epoch 0: of the samples that came out longer than max_seq_len, {left_out:,} left out" in plan.describe()
    assert f"\nepoch 0: {len(plan.dataset) - left_out:,} samples, " in plan.describe()
    assert len(plan.packs(1).members) == (plan.dataset.lengths_in(1) > 0).sum()
    words = [{"word": "a", "start": number / 2, "end": (number + 1) / 2} for number in range(40)]
    one = write_records(tmp_path / "one.jsonl", [{"units": [1] * 1000, "words": words}])
    with pytest.raises(DataError, match="no sample to train on; all are longer than max_seq_len 100 in epoch 0"):
        limited(Source(one, ALIGNED_UNITS), 100).describe()
