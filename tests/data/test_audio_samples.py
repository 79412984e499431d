"""Samples with recordings: from records over the token cache and the plan to the arrays of batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import deserialize_batches, deserialize_index, prefetch, serialize_batches, serialize_index
from erniekit.data.open_dataset import open_dataset, open_packed_dataset
from erniekit.data.packed import DataFingerprint, write_packed
from erniekit.data.sampler import StepPlan
from erniekit.data.token_cache import MANIFEST
from erniekit.errors import DataError
from tests.data.recordings import ListeningTemplate, audio_inputs, write_recording

PLAN = {"max_seq_len": 64, "packing": True, "greedy": True, "window": 16, "batch_size": 1, "accumulation": 2}


def spoken(paths: list[str], text: str, asked: str = "") -> dict:
    """A record of the type messages: recordings, then a question, and the answer."""
    question = {"role": "user", "content": "<audio>" * len(paths) + asked}
    return {"messages": [question, {"role": "assistant", "content": text}], "audios": paths}


@pytest.fixture
def open_spoken(tokenizer, write_jsonl, tmp_path) -> Callable[..., Dataset]:
    def open_(records: list, name: str = "data.jsonl", **options) -> Dataset:
        source = Source(write_jsonl(records, name), "messages")
        options = {"max_seq_len": 64, "cache_dir": tmp_path / "cache", "audio": audio_inputs(tokenizer)} | options
        return open_dataset([source], tokenizer, ListeningTemplate(tokenizer), **options)

    return open_


@pytest.fixture
def records(tmp_path) -> list[dict]:
    """Seven records: recordings of 0.05 to 0.35 s, one of two recordings and one without."""
    paths = [
        str(write_recording(tmp_path / "sound" / f"{number}.wav", 0.05 * number, pitch=200 * number))
        for number in range(1, 8)
    ]
    one_each = [spoken([path], f"number {number}") for number, path in enumerate(paths[:5])]
    return [spoken([], "because", "Why?"), *one_each, spoken(paths[5:], "two at once")]


def arrays_equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_the_cache_gives_back_what_was_built(open_spoken, records):
    built, opened = open_spoken(records), open_spoken(records)
    for number in range(len(records)):
        sample = opened.sample(number)
        assert sample.clips == built.sample(number).clips
        assert [each.clip.path for each in sample.clips] == records[number]["audios"]
        for each in sample.clips:
            own = sample.input_ids[each.place : each.place + each.tokens]
            assert (own == opened.audio.placeholder_id).all() and each.tokens == opened.audio.clip_tokens(each.length)
    assert opened.fingerprint == built.fingerprint


def test_all_paths_are_found_without_the_samples(open_spoken, records, monkeypatch):
    (arrays,) = open_spoken(records).source_arrays
    paths = [path for record in records for path in record["audios"]]
    for block in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("erniekit.data.token_cache._CLIP_BLOCK", block)
        assert list(arrays.clip_paths()) == paths
    (arrays,) = open_spoken(records[:1]).source_arrays
    assert list(arrays.clip_paths()) == []


def test_the_report_says_how_much_is_heard(open_spoken, records):
    (source,) = open_spoken(records).report.sources
    assert (source.audio.clips, round(source.audio.seconds, 2)) == (7, 1.4)
    assert re.search(r"7 recordings, 1\.4 seconds of sound \(38 tokens, 27\.1 tokens a second\)", str(source.audio))
    assert str(source.audio) in str(open_spoken(records).report)


def test_a_cache_of_text_is_as_it_always_was(open_spoken, make_source, tokenizer, template, tmp_path):
    """Without recordings no file is added, and without an encoder the name of the folder does not change."""
    source = make_source([{"src": "a", "tgt": "b"}])
    open_dataset([source], tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "text")
    (folder,) = (tmp_path / "text").iterdir()
    arrays = ("input_ids", "labels", "offsets", "lines", "chosen", "rejected", "score_differences")
    assert sorted(path.name for path in folder.iterdir()) == sorted([MANIFEST, *(f"{name}.bin" for name in arrays)])
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == 4 and set(manifest["facts"]) == {"counts", "unused_fields", "skipped"}
    assert set(manifest["bytes"]) == set(arrays)
    assert re.fullmatch(r"[0-9a-f]{32}-4", folder.name)


def test_a_changed_recording_is_measured_again(open_spoken, records):
    before = open_spoken(records)
    path = Path(records[1]["audios"][0])
    write_recording(path, 0.3)
    after = open_spoken(records)
    assert (before.sample(1).clips[0].length, after.sample(1).clips[0].length) == (800, 4800)
    assert after.fingerprint != before.fingerprint
    write_recording(path, 0.3, pitch=600)  # of the same length
    assert open_spoken(records).fingerprint not in (before.fingerprint, after.fingerprint)


def test_moved_data_goes_on(tokenizer, tmp_path):
    """The same records and recordings elsewhere are the same run; the cache of one place is not used in another."""
    found = []
    for place in ("here", "there"):
        path = write_recording(tmp_path / place / "one.wav", 0.1)
        file = tmp_path / place / "data.jsonl"
        file.write_text(json.dumps({"audio_path": "one.wav", "text": "one"}) + "\n")
        dataset = open_dataset(
            [Source(file, "asr")], tokenizer, ListeningTemplate(tokenizer),
            max_seq_len=64, cache_dir=tmp_path / "cache", audio=audio_inputs(tokenizer),
        )  # fmt: skip
        assert dataset.sample(0).clips[0].clip.path == str(path)
        found.append(dataset.fingerprint)
    assert found[0] == found[1]


def test_problems_of_recordings_name_the_line(open_spoken, records, tmp_path):
    (tmp_path / "sound" / "text.wav").write_text("this is no sound")
    (tmp_path / "sound" / "cut.wav").write_bytes(Path(records[5]["audios"][0]).read_bytes()[:1000])
    bad = [records[1], spoken(["sound/text.wav"], "a"), records[2], spoken(["sound/cut.wav"], "b")]
    bad.append(spoken(["missing.wav"], "c"))
    with pytest.raises(DataError) as told:
        open_spoken(bad)
    lines = str(told.value).splitlines()
    for number, name in ((2, "text.wav"), (4, "cut.wav"), (5, "missing.wav")):
        assert any(re.search(rf"data\.jsonl:{number}: .*expected", line) and name in line for line in lines[:3])
    assert "on_bad_record: skip" in lines[-1]
    kept = open_spoken(bad, on_bad_record="skip")
    assert [kept.line(number) for number in range(len(kept))] == [1, 3]
    assert kept.report.sources[0].skipped == 3


def test_a_skipped_recording_is_read_once_it_is_mended(open_spoken, records, tmp_path):
    bad = [*records, spoken(["sound/late.wav"], "late")]
    assert len(open_spoken(bad, on_bad_record="skip")) == len(records)
    write_recording(tmp_path / "sound" / "late.wav", 0.2)
    assert len(open_spoken(bad, on_bad_record="skip")) == len(bad)


def test_a_model_without_an_encoder_refuses_recordings(open_spoken, records):
    with pytest.raises(DataError, match=r"data\.jsonl:2: record: expected text, got a recording, but the model"):
        open_spoken(records, audio=None)
    assert len(open_spoken(records[:1], audio=None)) == 1


def test_long_recordings_follow_over_length_policy(open_spoken, records, tmp_path):
    long = spoken([str(write_recording(tmp_path / "long.wav", 3.0))], "too long")
    dataset = open_spoken([*records, long])
    assert len(dataset) == len(records) and dataset.report.sources[0].dropped == 1
    with pytest.raises(DataError, match=r"data\.jsonl:8: length: expected at most 64 tokens \(max_seq_len\), got"):
        open_spoken([*records, long], over_length="error")


def rounds(records: list[dict], *numbers: int) -> dict:
    """A dialogue whose questions are those of some records."""
    messages = [message for number in numbers for message in records[number]["messages"]]
    return {"messages": messages, "audios": [path for number in numbers for path in records[number]["audios"]]}


def test_dropped_turns_take_their_recordings_with_them(open_spoken, records):
    whole = open_spoken([rounds(records, 2, 0, 4, 5)], max_seq_len=200)
    shorter = open_spoken([rounds(records, 2, 0, 4, 5)], max_seq_len=70, over_length="truncate_turns")
    paths = [records[number]["audios"][0] for number in (2, 4, 5)]
    assert [each.clip.path for each in whole.sample(0).clips] == paths
    kept = shorter.sample(0)
    assert [each.clip.path for each in kept.clips] == paths[1:] and len(kept.input_ids) <= 70
    offset = len(whole.sample(0).input_ids) - len(kept.input_ids)
    assert [each.place for each in kept.clips] == [each.place - offset for each in whole.sample(0).clips[1:]]
    assert shorter.report.sources[0].truncated == 1


def test_pairs_have_the_recordings_of_their_prompts(tokenizer, write_jsonl, records, tmp_path):
    def open_(number: int, **options) -> Dataset:
        asked = rounds(records, number, 4)
        answers = [{"role": "assistant", "content": text} for text in ("a bell", "a dog")]
        pair = {
            "prompt": asked["messages"][:-1],
            "audios": asked["audios"],
            "chosen": answers[:1],
            "rejected": answers[1:],
        }
        return open_dataset(
            [Source(write_jsonl([pair]), "messages preferences")], tokenizer, ListeningTemplate(tokenizer),
            max_seq_len=200, cache_dir=tmp_path / "cache", audio=audio_inputs(tokenizer), **options,
        )  # fmt: skip

    whole, shorter = open_(2), open_(2, max_prompt_len=30)
    assert [each.clip.path for each in whole.sample(0).clips] == records[2]["audios"] + records[4]["audios"]
    assert [each.clip.path for each in shorter.sample(0).clips] == records[4]["audios"]
    (batch,) = StepPlan(whole, **PLAN | {"max_seq_len": 200}).micro_batches(0)
    assert ((batch.arrays["audio_states"] >= 0) == (batch.input_ids == whole.audio.placeholder_id)).all()
    assert batch.pairs is not None and batch.pairs.count == 1
    twice = open_(2, pair_window=30)  # positions, fewer than the pair has: then it has its prompt and recordings twice
    sample = twice.sample(0)
    first, second = sample.clips[:2], sample.clips[2:]
    assert [each.clip for each in first] == [each.clip for each in second] == [e.clip for e in whole.sample(0).clips]
    assert [each.place + sample.documents[0] for each in first] == [each.place for each in second]
    (batch,) = StepPlan(twice, **PLAN | {"max_seq_len": 200}).micro_batches(0)
    assert ((batch.arrays["audio_states"] >= 0) == (batch.input_ids == twice.audio.placeholder_id)).all()


def test_batches_have_the_arrays_of_their_recordings(open_spoken, records):
    dataset = open_spoken(records)
    plan = StepPlan(dataset, **PLAN)
    heard = 0
    for step in range(plan.steps_in_epoch(0)):
        for batch in plan.micro_batches(step):
            arrays = batch.arrays
            placeholders = batch.input_ids == dataset.audio.placeholder_id
            assert ((arrays["audio_states"] >= 0) == placeholders).all()
            clips = [each for row in batch.samples for index in row for each in dataset.sample(index).clips]
            assert arrays["audio_features"].shape[1:] == (8, 20) and arrays["audio_features"].dtype == np.float32
            assert arrays["audio_frames"].sum() == sum(-(-each.length // 160) for each in clips)
            heard += len(clips)
    assert heard == 7
    padding = plan.padding().arrays
    assert padding["audio_features"].shape == (0, 8, 20) and (padding["audio_states"] == -1).all()


@pytest.mark.parametrize(
    "options", [{"packing": False, "batch_tokens": 64}, {"multiple_of": 8}, {"batch_size": 3}], ids=str
)
def test_every_way_to_make_batches_places_the_states(open_spoken, records, options):
    dataset = open_spoken(records)
    plan = StepPlan(dataset, **PLAN | options)
    states = 0
    for step in range(plan.steps_in_epoch(0)):
        for batch in plan.micro_batches(step):
            placeholders = batch.input_ids == dataset.audio.placeholder_id
            assert ((batch.arrays["audio_states"] >= 0) == placeholders).all()
            states += int(placeholders.sum())
    assert states == dataset.report.sources[0].audio.tokens


def test_threads_and_a_later_start_give_the_same_batches(open_spoken, records):
    plan = StepPlan(open_spoken(records), **PLAN)
    alone = list(prefetch(plan, 0, workers=0, stop=6))
    ahead = list(prefetch(plan, 0, workers=3, stop=6))
    resumed = list(prefetch(StepPlan(open_spoken(records), **PLAN), 4, workers=2, stop=6))
    for one, other in zip([*alone, *alone[4:]], [*ahead, *resumed], strict=True):
        for batch, same in zip(one, other, strict=True):
            assert batch.samples == same.samples and arrays_equal(dict(batch.arrays), dict(same.arrays))


def test_features_are_made_by_the_threads(open_spoken, records, monkeypatch):
    seen = set()
    from erniekit.data import sampler

    read = sampler.audio_arrays
    monkeypatch.setattr(sampler, "audio_arrays", lambda *parts: (seen.add(threading.get_ident()), read(*parts))[1])
    list(prefetch(StepPlan(open_spoken(records), **PLAN), 0, workers=1, stop=2))
    assert seen and threading.get_ident() not in seen


def test_a_rank_that_embeds_nothing_reads_no_sound(open_spoken, records, monkeypatch):
    plan = StepPlan(open_spoken(records), **PLAN, embeds=False)
    monkeypatch.setattr("erniekit.data.sampler.audio_arrays", None)
    assert not any(name.startswith("audio") for batch in plan.micro_batches(0) for name in batch.arrays)


def test_a_recording_that_vanishes_is_told_with_its_record(open_spoken, records):
    dataset = open_spoken(records)
    os.unlink(records[3]["audios"][0])
    with pytest.raises(DataError, match=r"data\.jsonl:4: .*3\.wav"):
        for batches in prefetch(StepPlan(dataset, **PLAN), 0, workers=2, stop=3):
            del batches


def test_evaluation_reads_recordings_too(open_spoken, records):
    plan = EvaluationPlan(
        open_spoken(records), **{k: v for k, v in PLAN.items() if k != "accumulation"}, dp_world_size=2
    )
    batches = [batch for _, batch in plan.local_steps(plan.steps_in_epoch(0))]
    assert all("audio_features" in batch.arrays for batch in batches)


def test_another_rank_gets_the_arrays_and_makes_padding(open_spoken, records):
    dataset = open_spoken(records)
    sent = StepPlan(dataset, **PLAN).micro_batches(0)
    received = deserialize_batches(serialize_batches(sent))
    assert all(arrays_equal(dict(one.arrays), dict(two.arrays)) for one, two in zip(sent, received, strict=True))
    message = serialize_index(dataset)
    json.dumps(message.metadata)
    index = deserialize_index(message, dataset.audio)
    assert StepPlan(index, **PLAN).padding().arrays["audio_features"].shape == (0, 8, 20)
    assert str(index.report) == str(dataset.report)


def test_a_packed_folder_keeps_the_recordings(open_spoken, records, tokenizer, tmp_path):
    dataset = open_spoken(records)
    made_with = DataFingerprint(tokenizer.fingerprint, "listening", pairs=False, audio="an encoder")
    packs = StepPlan(dataset, **PLAN).packs(0)
    write_packed(tmp_path / "packed", dataset, packs, made_with)
    options = {"max_seq_len": 64, "pad_id": tokenizer.pad_id, "audio": dataset.audio}
    packed = open_packed_dataset(tmp_path / "packed", made_with, **options)
    for number, member in enumerate(packs.members):
        assert packed.sample(number).clips == dataset.sample(int(member)).clips
    assert packed.report.sources[0].audio == dataset.report.sources[0].audio
    with pytest.raises(DataError, match="packed with another audio encoder"):
        open_packed_dataset(tmp_path / "packed", replace(made_with, audio=""), **options)
    write_recording(Path(records[1]["audios"][0]), 0.3)
    with pytest.raises(DataError, match="its recordings have been changed, moved or removed"):
        open_packed_dataset(tmp_path / "packed", made_with, **options)


MEASURE = """
import re, sys
from erniekit.data.conversation import Source
from erniekit.data.open_dataset import open_dataset
from erniekit.data.loader import prefetch
from erniekit.data.sampler import StepPlan
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.recordings import ListeningTemplate, audio_inputs
tokenizer = load_tokenizer(sys.argv[1])
def peak_mb(path):
    for _ in range(2):  # built, and opened again
        dataset = open_dataset(
            [Source(path, "asr")], tokenizer, ListeningTemplate(tokenizer), max_seq_len=256, cache_dir=sys.argv[2],
            audio=audio_inputs(tokenizer),
        )
    plan = StepPlan(dataset, max_seq_len=256, packing=True, greedy=True, window=500, batch_size=2, accumulation=1)
    heard = sum(len(batch.arrays["audio_frames"]) for step in prefetch(plan, 0, 2, 40) for batch in step)
    assert heard > 100
    # not ru_maxrss, which begins with what the parent process had
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
print(*map(peak_mb, sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_memory_does_not_grow_with_the_number_of_recordings(tokenizer_folder, tmp_path):
    for number in range(20):
        write_recording(tmp_path / f"{number}.wav", 0.2)
    paths = []
    for count in (1_000, 10_000):
        paths.append(tmp_path / f"{count}.jsonl")
        records = ({"audio_path": f"{n % 20}.wav", "start": n / 1e6, "text": f"number {n}"} for n in range(count))
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, "-c", MEASURE, tokenizer_folder, tmp_path / "cache", *paths]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAYON_NUM_THREADS": "2"}
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True, env=environment
    )
    few, many = map(float, result.stdout.split())
    assert many - few < 16  # 9 of which are tokens and blocks of records; samples and clips as Python objects are more
    assert many < 200
