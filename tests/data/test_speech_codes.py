"""Records as codes: what is read from JSON lines and from shards, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data.formats.registry import FORMATS, read_records, recognise
from erniekit.data.formats.speech_codes import shards_at
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.units import CODES, SpokenText
from tests.data.speech_records import LEVELS, speech_records, write_code_shards, write_codes_jsonl

RECORD: dict[str, Any] = {"text": "a b", "codes": [[1, 2, 3], [4, 5, 6]]}


def read(path: Path) -> list[Any]:
    return [item if isinstance(item, tuple) else str(item) for item in read_records(path, CODES)]


def problem_of(tmp_path: Path, record: dict[str, Any]) -> str:
    (found,) = read(write_codes_jsonl(tmp_path / "a.jsonl", [record]))
    assert isinstance(found, str), "the record was read"
    return found.partition("a.jsonl:1: ")[2]


def test_a_line_has_its_codes_and_facts(tmp_path: Path) -> None:
    full = RECORD | {
        "id": 7, "audio_duration": 0.3, "language_id": "en", "instruct": "low", "text_pinyin": "yi", "speaker": "ann",
        "num_tokens": None,
        "similar": ["x", 3], "clean_start_token_idx": 2,
    }  # fmt: skip
    units = {"text": "a b", "units": "1 2 3", "duration": 0.3, "units_per_second": 10, "speaker": 12}
    (_, plain), (_, told), (line, one) = read(write_codes_jsonl(tmp_path / "a.jsonl", [RECORD, full, units]))
    assert plain.codes.tolist() == RECORD["codes"] and plain.codes.dtype == np.uint16 and plain.shape == (2, 3)
    assert (plain.largest, plain.seconds, plain.speaker, plain.clean_start, plain.place) == (6, None, "", -1, None)
    assert (told.key, told.seconds, told.language, told.instruct, told.pinyin) == ("7", 0.3, "en", "low", "yi")
    assert (told.speaker, told.similar, told.clean_start) == ("ann", ("x", "3"), 2)
    assert line == 3 and one.codes.tolist() == [[1, 2, 3]] and (one.frame_rate, one.speaker) == (10, "12")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codes": []}, "codes: expected lists of whole numbers from 0"),
        ({"codes": [[1, 2], [3]]}, "got lists of 1 and 2 numbers"),
        ({"codes": [[]]}, "got lists of 0 numbers"),
        ({"codes": [[1, -2]]}, "codes[0][1]: expected a whole number from 0 to 65,535, got -2"),
        ({"codes": [[1], [65536]]}, "codes[1][0]: expected a whole number from 0 to 65,535, got 65536"),
        ({"codes": [[1, True]]}, "codes[0][1]: expected a whole number from 0 to 65,535, got True"),
        ({"codes": [[1, 2.0]]}, "codes[0][1]"),
        ({"codes": "1 2"}, "codes: expected lists"),
        ({"codes": None, "units": [1, 70000]}, "units[1]: expected a code up to 65,535, got 70,000"),
        ({"codes": None, "units": []}, "units: expected the codes of the recording, got none"),
        ({"num_tokens": 4}, "num_tokens: expected 3, the frames of the codes, got 4"),
        ({"audio_duration": 0}, "audio_duration: expected a number above 0, got 0"),
        ({"audio_duration": "long"}, "audio_duration: expected a number of seconds"),
        ({"clean_start_token_idx": 4}, "clean_start_token_idx: expected a frame from 0 to 3, got 4"),
        ({"similar": "x"}, "similar: expected a list of ids, got 'x'"),
        ({"speaker": ["ann"]}, "speaker: expected a string"),
        ({"text": 3}, "text: expected a string, got 3"),
        (
            {"codes": None, "audio_path": "a.wav"},
            "codes: expected codes of the recording, got audio_path: run `erniekit codes` on these recordings first",
        ),
        ({"codes": None}, "codes: expected codes of the recording, got nothing"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_told(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    record = {name: value for name, value in (RECORD | changes).items() if value is not None or name != "codes"}
    assert said in problem_of(tmp_path, record)


def test_shards_have_the_records_of_lines_and_places_in_which_the_same_codes_lie(tmp_path: Path) -> None:
    lines = read(write_codes_jsonl(tmp_path / "a.jsonl"))
    folder = write_code_shards(tmp_path / "shards")
    (tmp_path / "shards" / "part-1").mkdir()
    found = read(folder)
    assert [line for line, _ in found] == [1, 2, 3, 4, 5, 6] * 2
    names = [shard.tar for shard in shards_at(folder)]
    for (_, mine), (_, other) in zip(found, lines, strict=True):
        assert isinstance(mine, SpokenText) and mine.codes is None and mine.place is not None
        content = names[mine.place.file].read_bytes()[mine.place.offset :]
        codes = np.frombuffer(content, f"<u{mine.place.item_size}", mine.place.levels * mine.place.frames)
        assert codes.reshape(mine.shape).tolist() == other.codes.tolist()
        for name in ("text", "seconds", "language", "speaker", "key", "largest", "clean_start", "instruct", "pinyin"):
            assert getattr(mine, name) == getattr(other, name)
    assert [line for line, _ in read(folder / "data.lst")] == [line for line, _ in found]
    assert [record.key for _, record in read(names[1])] == [f"utt-{number}" for number in range(6, 12)]


def test_places_hold_in_the_arrays_of_others(tmp_path: Path) -> None:
    codes = np.arange(6).reshape(2, 3)
    arrays = {
        "wide": codes.astype(np.int64), "byte": (codes + 250).astype(np.uint8), "turned": np.asfortranarray(codes),
        "swapped": codes.astype(">i2"),
    }  # fmt: skip
    with tarfile.open(tmp_path / "o.tar", "w") as tar:
        for name, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array)
            member = tarfile.TarInfo(f"{name}.npy")
            member.size = len(file.getvalue())
            tar.addfile(member, io.BytesIO(file.getvalue()))
    write_codes_jsonl(tmp_path / "o.jsonl", [{"id": name, "text": "a"} for name in arrays])
    content = (tmp_path / "o.tar").read_bytes()
    *found, problem = read(tmp_path / "o.tar")
    for _, record in found:
        size = abs(record.place.item_size)
        held = np.frombuffer(content, f"<u{size}", 6, record.place.offset)
        held = held.reshape(3, 2).T if record.place.item_size < 0 else held.reshape(2, 3)
        assert held.tolist() == arrays[record.key].tolist()
    assert [record.place.item_size for _, record in found] == [8, 1, -8]
    assert problem.endswith("o.jsonl:4: swapped.npy: expected numbers with their lowest byte first, got others")


def test_problems_of_shards_have_the_line_of_the_record_or_are_of_the_file(tmp_path: Path) -> None:
    folder = write_code_shards(tmp_path, shards=1)
    lines = (folder / "txts" / "s0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[0]["num_tokens"] = 99
    records[1]["clean_start_token_idx"] = -1
    records[2]["id"] = "other"
    write_codes_jsonl(folder / "txts" / "s0.jsonl", records)
    found = [item for item in read(folder) if isinstance(item, str)]
    txt, tar = folder / "txts" / "s0.jsonl", folder / "audios" / "s0.tar"
    assert len(found) == 5 and "seconds of sound, as the index says" in found[4]
    assert found[0].startswith(f"{txt}:1: num_tokens: expected the frames of the codes, got 99")
    assert found[1] == f"{txt}:2: clean_start_token_idx: expected a frame from 0 to 7, got -1"
    assert found[2] == f"{tar}: utt-2.npy: expected a record with this id in {txt}, got none"
    assert found[3].startswith(f"{txt}:3: record: expected other.npy in {tar}, got no such member")


def test_a_key_of_two_shards_and_a_cut_shard_are_problems(tmp_path: Path) -> None:
    twice = speech_records()
    twice[6]["id"] = "utt-0"
    found = [item for item in read(write_code_shards(tmp_path / "a", twice)) if isinstance(item, str)]
    assert found == [
        f"{tmp_path}/a/txts/s1.jsonl:1: id: expected a name that no other shard has, got 'utt-0', "
        f"as {tmp_path}/a/txts/s0.jsonl has"
    ]
    folder = write_code_shards(tmp_path / "b")
    tar = folder / "audios" / "s1.tar"
    tar.write_bytes(tar.read_bytes()[:1700])
    found = [item for item in read(folder) if isinstance(item, str)]
    assert found[0].startswith(f"{tar}: utt-7.npy: expected ") and "the file is cut short" in found[0]
    (empty := tmp_path / "empty").mkdir()
    assert read(empty) == [f"{empty}: file: expected a folder with data.lst, got none"]
    (empty / "units.jsonl").touch()
    assert read(empty)[0].endswith(f"got none: its codes are in {empty}/units.jsonl")


def test_unused_fields_of_shards_are_counted(tmp_path: Path) -> None:
    records = [record | {"mood": "gay", "audio_path": "a.wav"} for record in speech_records()]
    unused = UnusedFields(FORMATS[CODES])
    assert len(list(read_records(write_code_shards(tmp_path, records), CODES, unused))) == len(records)
    assert [(field.name, field.records) for field in unused.found()] == [("mood", len(records))]


def test_recognising_codes(tmp_path: Path) -> None:
    path = write_codes_jsonl(tmp_path / "a.jsonl")
    assert recognise(path, CODES) == CODES
    assert "write stage: TTS to train it" in str(recognise(path, "text"))
    assert recognise(write_code_shards(tmp_path / "s"), CODES) == CODES
    recordings = write_codes_jsonl(tmp_path / "b.jsonl", [{"audio_path": "a.wav", "text": "a"}])
    assert recognise(recordings, CODES) == CODES  # reading tells what is to be done
    dialogues = write_codes_jsonl(tmp_path / "c.jsonl", [{"src": ["a"], "tgt": ["b"]}])
    assert "recordings as codes, which stage TTS reads" in str(recognise(dialogues, CODES))
    assert len(speech_records()[0]["codes"]) == LEVELS


@pytest.mark.parametrize("seed", range(40))
def test_damaged_shards_never_raise_and_what_is_read_of_them_is_there(seed: int, tmp_path: Path) -> None:
    folder = write_code_shards(tmp_path, shards=1)
    rng = np.random.default_rng(seed)
    for path in (folder / "audios" / "s0.tar", folder / "txts" / "s0.jsonl", folder / "data.lst")[seed % 3 :]:
        content = bytearray(path.read_bytes())
        for _ in range(1 + seed % 4):
            content[rng.integers(len(content))] = rng.integers(256)
        path.write_bytes(bytes(content[: rng.integers(len(content))] if seed % 5 == 0 else content))
    for item in read(folder):
        if isinstance(item, str):
            assert ": expected " in item and ", got " in item
            continue
        place = item[1].place
        size = abs(place.item_size) * place.levels * place.frames
        held = (folder / "audios" / "s0.tar").read_bytes()[place.offset : place.offset + size]
        assert len(held) == size and np.frombuffer(held, f"<u{abs(place.item_size)}").max() == item[1].largest
