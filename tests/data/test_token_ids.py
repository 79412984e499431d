"""Records that are tokens already: packs of documents, `ids|labels` lines, and what is wrong with others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from erniekit.build.sources import training_sources
from erniekit.config import Config
from erniekit.data.collate import collate
from erniekit.data.conversation import Source
from erniekit.data.formats.problems import MalformedError
from erniekit.data.formats.registry import FORMATS, recognise
from erniekit.data.formats.token_ids import is_token_ids, parse_token_ids
from erniekit.data.open_dataset import open_dataset
from erniekit.data.ready_tokens import ready_sample
from erniekit.data.sampler import StepPlan
from erniekit.data.units import TokenIds
from erniekit.errors import ConfigurationError, DataError

BOS = 1


def opened(path, tokenizer, tmp_path, max_seq_len=64, **settings):
    source = Source(path, "token_ids")
    return open_dataset([source], tokenizer, None, max_seq_len=max_seq_len, cache_dir=tmp_path / "cache", **settings)


def written(tmp_path, *lines, name="data.txt"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def refusal(**record):
    with pytest.raises(MalformedError) as caught:
        parse_token_ids(record)
    return f"{caught.value.field}: expected {caught.value.expected}, got {caught.value.got}"


# Reading


def test_lines_and_fields_hold_the_same():
    labelled = TokenIds((5, 6, 7), (False, True, True))
    assert parse_token_ids({"text": "5 6 7|-100 6 7"}) == labelled
    assert parse_token_ids({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == labelled
    assert parse_token_ids({"input_ids": "5 6 7", "labels": "-100 6 7"}) == labelled  # of a table
    assert parse_token_ids({"text": "5 6 7"}) == TokenIds((5, 6, 7), (True, True, True), packed=True)
    assert parse_token_ids({"input_ids": [5, 6, 7]}) == parse_token_ids({"text": " 5  6 7 "})


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (
            {"text": "5 six 7"},
            "input_ids: expected token ids, whole numbers from 0 with spaces between them, got 'six'",
        ),
        ({"text": "5 -6 7"}, "got '-6'"),
        ({"text": "5 6.0"}, "got '6.0'"),
        ({"text": "5 6|5"}, "labels: expected as many labels as ids (2), got 1"),
        ({"text": "5 6|"}, "labels: expected labels, each the id beside it or -100, got nothing"),
        ({"text": "|5 6"}, "input_ids: expected token ids, whole numbers from 0 with spaces between them, got nothing"),
        ({"text": "5 6|5 6|5 6"}, "expected one '|' between ids and labels, got more than one"),
        ({"text": "5 6 7|5 6 8"}, "labels[2]: expected the id 7 or -100, got 8"),
        ({"text": "5 6 7|6 7 -100"}, "labels[0]: expected the id 5 or -100, got 6 (labels stand beside"),
        ({"text": "5 " + "9" * 5000}, "(5,000 characters)"),
        ({"input_ids": []}, "got nothing"),
        ({"input_ids": [5, True]}, "input_ids[1]: expected token ids"),
        ({"input_ids": [5, 6.0]}, "input_ids[1]"),
        ({"input_ids": [5, 10**12]}, "input_ids[1]"),
        ({"input_ids": [5], "labels": {}}, "labels: expected labels"),
        ({"labels": [5]}, "input_ids: expected token ids, whole numbers from 0 with spaces between them, got nothing"),
    ],
)
def test_what_is_wrong_is_named(record, says):
    assert says in refusal(**record)


def test_problems_have_lines_and_the_other_lines_stay(tokenizer, tmp_path):
    path = written(tmp_path, "1 5 6", "", "1 5 x", f"1 {tokenizer.vocab_size} 6", "1 7 8")
    with pytest.raises(DataError) as caught:
        opened(path, tokenizer, tmp_path)
    message = str(caught.value)
    assert f"{path}:2: input_ids: expected token ids" in message and "got an empty line" in message
    assert f"{path}:3: input_ids" in message
    last = tokenizer.vocab_size - 1
    assert (
        f"{path}:4: input_ids[1]: expected ids from 0 to {last:,}, which the tokenizer has, got {last + 1:,}" in message
    )
    assert "3 problems" in message
    kept = opened(path, tokenizer, tmp_path, on_bad_record="skip")
    assert [kept.sample(index).labels.tolist() for index in range(len(kept))] == [[5, 6], [7, 8]]
    assert [kept.line(index) for index in range(2)] == [1, 5]


def test_its_type_is_recognised_where_it_is_certain(tmp_path):
    labelled = written(tmp_path, "1 2 3 4 5 6 7 8 9 10|-100 -100 3 4 5 6 7 8 9 10")
    assert recognise(labelled, "erniekit") == recognise(labelled, "text") == "token_ids"
    fields = written(tmp_path, '{"input_ids": [1, 2], "labels": [1, 2]}', name="data.jsonl")
    assert recognise(fields, "erniekit") == "token_ids"
    numbers = written(tmp_path, "1 2 3 4 5 6 7 8 9 10 11", name="numbers.txt")
    assert recognise(numbers, "text") == "text"
    assert not is_token_ids({"text": "3 | 4"}) and FORMATS["text"].fits({"text": "a", "input_ids": [1]})


@pytest.mark.proves("train_dataset_type")
@pytest.mark.parametrize("stage", ["PT", "SFT"])
def test_stages_of_documents_read_ids(stage):
    values = {
        "stage": stage,
        "output_dir": "o",
        "model_name_or_path": "m",
        "train_dataset_path": "d.txt",
        "train_dataset_type": "token_ids",
    }
    assert Config.from_mapping(values).training.train_dataset_type == ("token_ids",)


def test_pairs_cannot_be_read_from_ids():
    values = {
        "stage": "DPO",
        "output_dir": "o",
        "model_name_or_path": "m",
        "train_dataset_path": "d.txt",
        "train_dataset_type": "token_ids",
    }
    with pytest.raises(ConfigurationError, match="reads pairs of answers, not"):
        Config.from_mapping(values)


# Samples


def test_labels_are_shifted_and_nothing_behind_the_last_target_is_kept():
    sample = ready_sample(TokenIds((1, 5, 6, 7, 8), (False, False, True, True, False)), BOS)
    assert sample.input_ids.tolist() == [1, 5, 6] and sample.labels.tolist() == [-100, 6, 7]
    assert sample.documents == ()


def test_documents_of_a_pack_begin_with_bos():
    pack = (1, 5, 6, 2, 1, 7, 2, 1, 1, 8, 9, 2)  # one of them has nothing but BOS
    sample = ready_sample(TokenIds(pack, (True,) * len(pack), packed=True), BOS)
    assert sample.input_ids.tolist() == [1, 5, 6, 1, 7, 1, 8, 9]
    assert sample.labels.tolist() == [5, 6, 2, 7, 2, 8, 9, 2]
    assert sample.documents == (3, 5)
    whole = ready_sample(TokenIds(pack, (True,) * len(pack), packed=True), None)
    assert whole.documents == () and len(whole.input_ids) == len(pack) - 1
    labelled = ready_sample(TokenIds(pack, (True,) * len(pack)), BOS)  # a dialogue may write BOS in every turn
    assert labelled.documents == ()


def test_a_pack_is_what_packing_its_documents_gives():
    generator = np.random.default_rng(0)
    documents = [[BOS, *generator.integers(3, 90, size).tolist(), 2] for size in generator.integers(1, 12, 20)]
    ids = tuple(token for document in documents for token in document)
    pack = collate([[ready_sample(TokenIds(ids, (True,) * len(ids), packed=True), BOS)]], [[0]], 0)
    alone = [ready_sample(TokenIds(tuple(each), (True,) * len(each)), BOS) for each in documents]
    expected = collate([alone], [range(20)], 0)
    assert pack.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(pack.arrays[name], array)


def test_rows_are_the_lines_in_their_order(tokenizer, tmp_path):
    """As the trainer of seed files has it: a line is a row, and the order of the file that of the rows."""
    bos = tokenizer.bos_id
    generator = np.random.default_rng(1)
    packs = [
        [[bos, *generator.integers(10, 60, size).tolist()] for size in generator.integers(2, 9, 3)] for _ in range(5)
    ]
    lines = [" ".join(str(token) for document in pack for token in document) for pack in packs]
    dataset = opened(written(tmp_path, *lines), tokenizer, tmp_path)
    again = opened(written(tmp_path, *lines), tokenizer, tmp_path)  # of the cache
    plan = StepPlan(
        again, max_seq_len=64, packing=False, greedy=False, window=1, batch_size=2, accumulation=1, shuffle=False
    )
    rows = [row for step in range(3) for batch in plan.micro_batches(step) for row in batch.samples if row]
    assert rows[:5] == [(0,), (1,), (2,), (3,), (4,)]
    for number, pack in enumerate(packs):
        sample = again.sample(number)
        assert sample.documents == dataset.sample(number).documents
        borders = [0, *sample.documents, len(sample.input_ids)]
        assert [sample.input_ids[a:b].tolist() for a, b in pairwise(borders)] == [document[:-1] for document in pack]
        assert [sample.labels[a:b].tolist() for a, b in pairwise(borders)] == [document[1:] for document in pack]


def test_a_long_pack_is_cut_and_a_long_dialogue_is_dropped_or_refused(tokenizer, tmp_path):
    bos = tokenizer.bos_id
    pack = " ".join(map(str, [bos, 10, 11, 12, 13, bos, 14, 15, 16, 17]))
    dataset = opened(written(tmp_path, pack), tokenizer, tmp_path, max_seq_len=5)
    assert [dataset.sample(index).input_ids.tolist() for index in range(2)] == [[bos, 10, 11, 12, bos], [14, 15, 16]]
    assert [dataset.sample(index).documents for index in range(2)] == [(4,), ()]
    assert "1 split into several samples" in str(dataset.report)
    labelled = "5 6 7 8 9 10 11|-100 6 7 8 9 10 11"
    short = "5 6|-100 6"
    kept = opened(written(tmp_path, labelled, short, name="sft.txt"), tokenizer, tmp_path, max_seq_len=5)
    assert len(kept) == 1 and "1 dropped (longer than max_seq_len)" in str(kept.report)
    with pytest.raises(DataError, match=r"sft.txt:1: length: expected at most 5 tokens \(max_seq_len\), got 6"):
        opened(tmp_path / "sft.txt", tokenizer, tmp_path, max_seq_len=5, over_length="error")


def test_a_record_without_targets_trains_nothing(tokenizer, tmp_path):
    dataset = opened(written(tmp_path, "5 6|5 -100", "5 6|5 6"), tokenizer, tmp_path)
    assert len(dataset) == 1 and dataset.report.sources[0].skipped == 1


def test_a_text_of_numbers_is_read_as_such_and_told(tmp_path, caplog):
    path = written(tmp_path, "1 2 3 4 5 6 7 8 9 10 11", "7 8 9 10 11 12 13 14 15 16")
    values = {"stage": "PT", "output_dir": "o", "model_name_or_path": "m", "train_dataset_path": str(path)}
    with caplog.at_level("WARNING", "erniekit"):
        (source,) = training_sources(Config.from_mapping(values))
        assert source.kind == "text" and "write train_dataset_type: token_ids" in caplog.text
        caplog.clear()
        training_sources(Config.from_mapping({**values, "train_dataset_type": "token_ids"}))
    assert not caplog.text
