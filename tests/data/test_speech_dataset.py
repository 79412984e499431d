"""Recordings as codes in the token cache: what is stored, read by offset, refused when it changes, and reported."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data.code_reader import CodeReader, SpeechFacts, split_offset
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.drawing import SpokenFacts
from erniekit.data.loader import deserialize_index, serialize_index
from erniekit.data.open_dataset import open_dataset
from erniekit.data.split import Split
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import CODES
from erniekit.errors import DataError
from tests.data.speech_records import (
    COUNT,
    LEVELS,
    masked_codes,
    open_speech,
    speech_records,
    speech_settings,
    write_code_shards,
    write_codes_jsonl,
)


def reader_of(dataset: Dataset) -> CodeReader:
    return CodeReader(dataset.source_arrays[0])


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_code_shards(tmp_path / "codes")


def test_shards_and_lines_hold_the_same_and_shards_are_not_copied(
    tmp_path: Path, shards: Path, tokenizer: Tokenizer
) -> None:
    lines = open_speech(write_codes_jsonl(tmp_path / "a.jsonl"), tokenizer, tmp_path / "cache")
    placed = open_speech(shards, tokenizer, tmp_path / "cache")
    for index, record in enumerate(speech_records()):
        for dataset in (lines, placed):
            codes = dataset.codes(index)
            assert codes.dtype == np.int32 and codes.tolist() == record["codes"]
            assert reader_of(dataset).first_level(index).tolist() == record["codes"][0]
        for mine, other in zip(reader_of(placed).texts(index), reader_of(lines).texts(index), strict=True):
            assert mine.tolist() == other.tolist()
        for epoch in (0, 2):
            assert placed.sample(index, epoch).input_ids.tolist() == lines.sample(index, epoch).input_ids.tolist()
            for name in ("codes", "code_labels"):
                mine, other = (each.sample(index, epoch).arrays[name] for each in (placed, lines))
                assert mine.tolist() == other.tolist()
    assert placed.lengths_in(1).tolist() == lines.lengths_in(1).tolist() != placed.lengths_in(0).tolist()
    assert len(lines.source_arrays[0].codes) == sum(LEVELS * (6 + number) for number in range(COUNT))
    assert not len(placed.source_arrays[0].codes)
    assert lines.location(7) == f"{tmp_path / 'a.jsonl'}:8"
    assert placed.location(7) == f"{shards / 'txts' / 's1.jsonl'}:2"


def test_the_numbers_of_recordings(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    dataset = open_speech(shards, tokenizer, tmp_path / "cache")
    facts, reader = SpokenFacts.of(dataset.source_arrays[0].spoken), reader_of(dataset)
    records = speech_records()
    assert facts.frames.tolist() == [6 + number for number in range(COUNT)]
    assert facts.clean_start.tolist() == [3 if number == 6 else -1 for number in range(COUNT)]
    assert facts.speaker.tolist() == reader.speaker().tolist() == dataset.speaker_of.tolist() == [0, 1, 2] * 4
    assert facts.milliseconds.tolist() == dataset.milliseconds.tolist() == [100 * (6 + n) for n in range(COUNT)]
    for index, record in enumerate(records):
        text, pinyin, language, instruct = (tokenizer.decode(ids.tolist()) for ids in reader.texts(index))
        assert text == record["text"] and language == record.get("language_id", "")
        assert (pinyin, instruct) == (record.get("text_pinyin", ""), record.get("instruct", ""))
    assert dataset.levels == LEVELS and dataset.varies
    speech = SpeechFacts.of(dataset.source_arrays[0].metadata)
    assert speech is not None and speech.speakers == ("ann", "bob", "cy") and speech.alone == 0
    assert speech.seconds == pytest.approx(sum(record["audio_duration"] for record in records))


def test_ranks_without_data_have_the_lengths_and_speakers(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    dataset = open_speech(shards, tokenizer, tmp_path / "cache")
    received = deserialize_index(serialize_index(dataset))
    assert received.lengths_in(3).tolist() == dataset.lengths_in(3).tolist()
    assert received.speaker_of.tolist() == dataset.speaker_of.tolist() and received.levels == LEVELS
    assert received.milliseconds.tolist() == dataset.milliseconds.tolist()
    assert received.location(7) == dataset.location(7) and str(received.report) == str(dataset.report)


def test_speakers_of_two_files_are_one_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = speech_records()
    del records[1]["speaker"]
    first = write_codes_jsonl(tmp_path / "a.jsonl", records[:3])
    second = write_codes_jsonl(tmp_path / "b.jsonl", records[8:10])
    dataset = open_dataset(
        [Source(first, CODES), Source(second, CODES)], tokenizer, None, max_seq_len=200, cache_dir=tmp_path / "cache",
        drawing=masked_codes(tokenizer), speech=speech_settings(),
    )  # fmt: skip
    assert dataset.speaker_of.tolist() == [0, -1, 1, 1, 0]
    report = str(dataset.report)
    assert (
        "3 recordings, 2.1 seconds of sound, 2 named speakers (3 recordings have no other of their speaker)" in report
    )


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda tar: tar.rename(tar.with_name("elsewhere")), "no such file: it was moved or removed"),
        (lambda tar: tar.write_bytes(tar.read_bytes()[:2000]), "got 2,000 bytes"),
        (lambda tar: tar.write_bytes(tar.read_bytes() + b"\0"), "bytes, got "),
        (lambda tar: os.utime(tar, ns=(0, tar.stat().st_mtime_ns + 10**9)), "another time of modification"),
    ],
    ids=["moved", "truncated", "longer", "touched"],
)  # fmt: skip
def test_a_shard_that_changes_during_a_run_is_refused(
    harm: Any, said: str, tmp_path: Path, shards: Path, tokenizer: Tokenizer
) -> None:
    dataset = open_speech(shards, tokenizer, tmp_path / "cache")
    assert dataset.sample(11).arrays["codes"].shape[1] == LEVELS
    tar = shards / "audios" / "s1.tar"
    harm(tar)
    assert dataset.codes(0).shape == (LEVELS, 6)  # the other shard is as it was
    with pytest.raises(DataError) as refused:
        dataset.sample(11)
    assert str(refused.value).startswith(f"{tar}: expected the shard as it was") and said in str(refused.value)


def test_codes_that_no_codec_gives_are_refused_even_if_nothing_else_changed(
    tmp_path: Path, shards: Path, tokenizer: Tokenizer
) -> None:
    dataset = open_speech(shards, tokenizer, tmp_path / "cache")
    tar = shards / "audios" / "s0.tar"
    place, status = reader_of(dataset).place(2), tar.stat()
    assert place is not None
    with open(tar, "r+b") as file:
        file.seek(place.offset)
        file.write(b"\x00\x7f")
    os.utime(tar, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match="a code of 32,512"):
        dataset.codes(2)


def test_a_changed_or_moved_shard_is_read_anew_at_the_next_start(
    tmp_path: Path, shards: Path, tokenizer: Tokenizer
) -> None:
    before = open_speech(shards, tokenizer, tmp_path / "cache")
    again = open_speech(shards, tokenizer, tmp_path / "cache")
    assert again.fingerprint == before.fingerprint
    moved = tmp_path / "elsewhere"
    shards.rename(moved)
    elsewhere = open_speech(moved, tokenizer, tmp_path / "cache")
    assert elsewhere.fingerprint == before.fingerprint  # so a run may go on with it
    assert elsewhere.codes(11).tolist() == speech_records()[11]["codes"]
    records = speech_records()
    records[11]["codes"][2][3] ^= 1
    shutil.rmtree(moved)
    changed = open_speech(write_code_shards(moved, records), tokenizer, tmp_path / "cache")
    assert changed.fingerprint != before.fingerprint
    assert changed.codes(11).tolist() == records[11]["codes"]


def test_threads_share_a_reader(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    dataset = open_speech(shards, tokenizer, tmp_path / "cache")
    expected = [record["codes"] for record in speech_records()] * 5
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: dataset.codes(number % COUNT).tolist(), range(5 * COUNT)))
    assert found == expected


def test_the_settings_of_the_codec_make_another_cache(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    cache = tmp_path / "cache"
    for settings in ({}, {"frontend": "characters"}, {"needs_text": False}, {}):
        open_speech(shards, tokenizer, cache, speech=speech_settings(**settings))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3
    characters = open_speech(shards, tokenizer, cache, speech=speech_settings(frontend="characters"))
    text, *_ = reader_of(characters).texts(0)
    assert len(text) == len(speech_records()[0]["text"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codes": [[1] * 6] * 2}, "a.jsonl:1: codes: expected 3 levels, those of the codec, got 2"),
        ({"codes": [[16] * 6] * 3}, "a.jsonl:1: codes: expected codes below 16, the size of the codec's books, got 16"),
        ({"audio_duration": 0.9}, "a.jsonl:1: audio_duration: expected about 0.60 s, of 6 frames at 10 a second, got"),
        ({"units_per_second": 50}, "a.jsonl:1: units_per_second: expected 10, the frames of the codec, got 50"),
        ({"text": " "}, "a.jsonl:1: text: expected what is said (condition_dropout: 1 trains without texts)"),
    ],
)
def test_records_that_do_not_fit_the_codec_stop_or_are_skipped(
    changes: dict[str, Any], said: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = speech_records()
    records[0] |= changes
    path = write_codes_jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(DataError) as refused:
        open_speech(path, tokenizer, tmp_path / "cache")
    assert said in str(refused.value)
    skipping = open_speech(path, tokenizer, tmp_path / "cache", on_bad_record="skip")
    assert len(skipping) == COUNT - 1 and skipping.line(0) == 2


def test_problems_of_shards_are_told_with_the_file_and_line_of_the_record(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = speech_records()
    records[1] |= {"text": ""}
    records[7] |= {"text": ""}
    folder = write_code_shards(tmp_path / "codes", records)
    with pytest.raises(DataError) as refused:
        open_speech(folder, tokenizer, tmp_path / "cache")
    for name in ("s0", "s1"):
        assert f"{folder}/txts/{name}.jsonl:2: text: expected what is said" in str(refused.value)
    dataset = open_speech(folder, tokenizer, tmp_path / "cache", on_bad_record="skip")
    report = str(dataset.report)
    assert f"skipped {folder}/txts/s1.jsonl:2: text: expected" in report and "2 skipped" in report
    assert len(dataset) == COUNT - 2 and dataset.location(6) == f"{folder}/txts/s1.jsonl:3"
    listed = Path(dataset.report.sources[0].skipped_file).read_text()
    assert listed.count("\n") == 2 and f"{folder}/txts/s0.jsonl:2: text" in listed


def test_a_record_without_text_trains_where_no_text_is_needed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [record | {"text": ""} for record in speech_records()]
    path = write_codes_jsonl(tmp_path / "a.jsonl", records)
    dataset = open_speech(path, tokenizer, tmp_path / "cache", speech=speech_settings(needs_text=False))
    assert len(dataset) == COUNT and not len(reader_of(dataset).texts(0)[0])


@pytest.mark.parametrize("over_length", ["drop", "error"])
def test_recordings_that_never_fit(over_length: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_codes_jsonl(tmp_path / "a.jsonl")
    options: dict[str, Any] = {"max_seq_len": 14, "over_length": over_length}
    options["drawing"] = masked_codes(tokenizer, max_seq_len=14)
    if over_length == "error":
        with pytest.raises(DataError, match=r"length: expected at most 14 positions \(max_seq_len\)"):
            open_speech(path, tokenizer, tmp_path / "cache", **options)
        return
    dataset = open_speech(path, tokenizer, tmp_path / "cache", **options)
    assert dataset.report.sources[0].dropped == 3 and len(dataset) == COUNT - 3


def test_a_part_of_the_records_is_held_out(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    found = []
    for held_out in (False, True):
        source = Source(shards, CODES, split=Split(0.25, 1, held_out))
        dataset = open_dataset(
            [source], tokenizer, None, max_seq_len=200, cache_dir=tmp_path / "cache", drawing=masked_codes(tokenizer),
            speech=speech_settings(),
        )  # fmt: skip
        found.append([dataset.codes(index).shape[1] - 6 for index in range(len(dataset))])
    assert sorted(found[0] + found[1]) == list(range(COUNT)) and len(found[1]) == 3


def test_similar_recordings_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = speech_records()
    records[0]["similar"] = ["not here", "utt-0", "utt-9", "utt-3"]
    records[1]["similar"] = ["not here"]
    dataset = open_speech(write_codes_jsonl(tmp_path / "a.jsonl", records), tokenizer, tmp_path / "cache")
    assert reader_of(dataset).facts.similar == ((0, 9),)


def test_missing_shards_and_an_empty_folder_are_told(tmp_path: Path, shards: Path, tokenizer: Tokenizer) -> None:
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"expected a folder with data\.lst, got none"):
        open_speech(empty, tokenizer, tmp_path / "cache")
    with pytest.raises(DataError, match="no such file"):
        open_speech(tmp_path / "none.lst", tokenizer, tmp_path / "cache")
    (shards / "audios" / "s0.tar").unlink()
    with pytest.raises(DataError, match=r"data\.lst: line 1: expected files that exist"):
        open_speech(shards, tokenizer, tmp_path / "cache")


@pytest.mark.parametrize("offset", [0, 5, (1 << 31) - 1, 1 << 31, (1 << 40) + 12345])
def test_offsets_are_two_numbers_of_31_bits(offset: int) -> None:
    high, low = split_offset(offset)
    assert max(high, low) < 1 << 31 and (high << 31 | low) == offset


@pytest.mark.proves("duration_range")
def test_recordings_outside_of_the_durations_are_left_out_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_codes_jsonl(tmp_path / "a.jsonl")
    settings = speech_settings(shortest=0.8, longest=1.2)
    dataset = open_speech(path, tokenizer, tmp_path / "cache", speech=settings)
    assert dataset.milliseconds.tolist() == [800, 900, 1000, 1100, 1200]
    assert "12 records, 5 kept, 7 dropped (outside of duration_range)" in str(dataset.report)
    with pytest.raises(DataError, match="none of its 12 recordings has a duration within duration_range"):
        open_speech(path, tokenizer, tmp_path / "cache", speech=speech_settings(shortest=5.0))


def test_codes_of_the_cache_that_are_cut_meanwhile_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    dataset = open_speech(write_codes_jsonl(tmp_path / "a.jsonl"), tokenizer, tmp_path / "cache")
    (codes,) = (tmp_path / "cache").glob("*/codes.bin")
    os.truncate(codes, 10)
    with pytest.raises(DataError, match=r"codes\.bin: something has truncated this file"):
        dataset.codes(0)
