"""The list of records whose recordings are encoded: fields, ids, places, and what is wrong with records."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from erniekit.data.record_list import RecordList, data_identity, open_list, write_list
from erniekit.errors import DataError
from tests.data.recordings import write_recording


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        write_recording(tmp_path / f"{name}.wav", 0.05)
    return tmp_path


def write_lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def listed(tmp_path: Path, *paths: str) -> RecordList:
    return write_list(tmp_path / "list", paths, ())


def errors(records: RecordList) -> list[str]:
    lines = [json.loads(line) for line in records.errors.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == records.facts.errors
    return [f"{Path(line['place']).name}: {line['reason']}" for line in lines]


def test_fields_are_kept_and_ids_are_those_of_records_or_made(sounds: Path) -> None:
    path = write_lines(
        sounds / "data.jsonl",
        {"audio_path": "a.wav", "text": "ä", "speaker": {"name": ["x", None]}, "id": "first"},
        {"audio_filepath": "b.wav", "offset": 0.01, "duration": 0.02, "id": 7},
        {"wav": "c.wav"},
    )
    records = listed(sounds, path)
    assert [records[number].id for number in range(len(records))] == ["first", "7", "data-3"]
    assert records[0].fields == {"audio_path": "a.wav", "text": "ä", "speaker": {"name": ["x", None]}, "id": "first"}
    assert (records[1].clip.start, records[1].clip.end, records[1].place) == (0.01, 0.03, f"{path}:2")
    assert records[2].clip.path == str((sounds / "c.wav").resolve())


def test_files_of_one_name_make_different_ids(sounds: Path) -> None:
    for name in ("x", "y"):
        (sounds / name).mkdir()
        write_recording(sounds / name / "a.wav", 0.05)
    paths = [write_lines(sounds / name / "d.jsonl", {"wav": "a.wav"}) for name in ("x", "y")]
    records = listed(sounds, *paths)
    assert [records[number].id for number in range(2)] == ["d-1-1", "d-2-1"]


def test_tables_are_read_and_the_bytes_of_sounds_are_left_out(sounds: Path) -> None:
    content = (sounds / "a.wav").read_bytes()
    column = [{"bytes": content, "path": None}]
    day = [datetime.date(2026, 11, 22)]
    pq.write_table(pa.table({"audio": column, "text": ["six"], "day": day, "raw": [b"x"]}), sounds / "t.parquet")
    (sounds / "t.csv").write_text("audio_path,text,id\nb.wav,seven,u1\n", encoding="utf-8")
    records = listed(sounds, str(sounds / "t.parquet"), str(sounds / "t.csv"))
    assert [records[number].fields for number in range(2)] == [
        {"text": "six", "day": "2026-11-22"}, {"audio_path": "b.wav", "text": "seven", "id": "u1"},
    ]  # fmt: skip
    assert (records[0].id, records[0].clip.row, records[0].clip.column) == ("t-1-1", 0, "audio")
    assert sorted(records.facts.left_out) == ["audio", "raw"]


def test_records_without_a_recording_or_with_an_id_again_are_errors(sounds: Path) -> None:
    path = write_lines(
        sounds / "data.jsonl",
        {"wav": "a.wav", "id": "x"},
        {"wav": "nothing.wav"},
        {"text": "six"},
        {"wav": "b.wav", "id": "x"},
        {"wav": "b.wav", "id": 1.5},
        {"wav": "b.wav", "id": "ü" * 101},
        {"wav": "b.wav", "id": ""},
        "words",
        {"wav": "b.wav", "start": 3, "end": 2},
        {"wav": "c.wav", "id": "y"},
    )
    records = listed(sounds, path)
    assert [records[number].id for number in range(len(records))] == ["x", "y"]
    found = errors(records)
    for expected in (
        "data.jsonl:2: wav: expected a sound file below",
        "data.jsonl:3: audio_path: expected the path of a sound file, got nothing",
        f"data.jsonl:4: id: expected one that no other record has, got that of {path}:1",
        "data.jsonl:5: id: expected a text or an integer, got 1.5",
        "data.jsonl:6: id: expected 1 to 200 bytes, got 202",
        "data.jsonl:7: id: expected 1 to 200 bytes, got 0",
        "data.jsonl:8: record: expected a JSON object, got 'words'",
        "data.jsonl:9: end: expected seconds after the start (3), got 2",
    ):
        assert any(line.startswith(expected) for line in found), (expected, found)
    assert len(found) == 8


def test_a_list_is_opened_again_while_its_data_is_the_same(sounds: Path) -> None:
    path = write_lines(sounds / "data.jsonl", {"wav": "a.wav"})
    listed(sounds, path).close()
    again = open_list(sounds / "list", data_identity([path], ()))
    assert again is not None and again[0].id == "data-1"
    write_lines(sounds / "data.jsonl", {"wav": "a.wav"}, {"wav": "b.wav"})
    assert open_list(sounds / "list", data_identity([path], ())) is None


def test_files_without_any_recording_are_refused(sounds: Path) -> None:
    path = write_lines(sounds / "data.jsonl", {"text": "six"})
    with pytest.raises(DataError, match=r"data\.jsonl:1: audio_path: expected the path of a sound file"):
        listed(sounds, path)
    with pytest.raises(DataError, match="no such file"):
        listed(sounds, str(sounds / "missing.jsonl"))
