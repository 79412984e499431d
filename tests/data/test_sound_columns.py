"""`Audio` columns of Parquet files and of data sets of the hub: clips of rows, and no byte of the sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pytest

from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import read_records
from erniekit.data.formats.sound_columns import hub_rows, sound_columns
from erniekit.data.media.clip import Clip, ContentClip

SOUND = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def sound(data, path):
    return {"bytes": data, "path": path}


def write(path: Path, sounds: list, group: int = 4, **columns: list) -> Path:
    from pyarrow import parquet

    columns = columns or {"sentence": [f"number {number}" for number in range(len(sounds))]}
    table = pyarrow.table({"audio": pyarrow.array(sounds, SOUND), **columns})
    parquet.write_table(table, path, row_group_size=group)
    return path


def clips(path, kind="asr", **options):
    items = read_records(path, kind, **options)
    return [str(item) if isinstance(item, RecordProblem) else item[1].clips[0] for item in items]


def test_a_row_with_bytes_is_a_clip_of_the_file(tmp_path):
    path = write(tmp_path / "a.parquet", [sound(b"RIFF", f"{number}.wav") for number in range(10)])
    assert clips(path) == [Clip(str(path), row=number, column="audio") for number in range(10)]
    assert [record.turns[1].content for _, record in read_records(path, "asr")][9] == "number 9"


def test_a_row_without_bytes_is_the_file_that_it_names(tmp_path):
    """In the first row group all rows have bytes, in the second some, in the third none."""
    (tmp_path / "1.wav").write_bytes(b"RIFF")
    kinds = [
        sound(b"R", "x.wav"),
        sound(b"", None),
        *[sound(None, "1.wav"), sound(b"R", None)],
        *[sound(None, "1.wav")] * 2,
    ]
    path = write(tmp_path / "a.parquet", kinds, group=2)
    file = Clip(str(tmp_path / "1.wav"))
    rows = {row: Clip(str(path), row=row, column="audio") for row in (0, 1, 3)}
    assert clips(path) == [rows.get(number, file) for number in range(6)]
    gone = clips(write(tmp_path / "b.parquet", [None, sound(None, None), sound(None, "2.wav")]))
    assert f"{tmp_path / 'b.parquet'}:1: audio_path: expected the path of a sound file, got nothing" in gone[0]
    assert "b.parquet:3: audio.path: expected a sound file below" in gone[2]


def test_no_sound_is_read(tmp_path):
    path = write(tmp_path / "a.parquet", [sound(os.urandom(100_000), "x") for _ in range(100)], group=100)
    before = pyarrow.total_allocated_bytes()
    held = max(pyarrow.total_allocated_bytes() for _ in read_records(path, "asr")) - before
    assert held < 1_000_000 < path.stat().st_size


def test_dialogues_have_columns_of_sound(tmp_path):
    talk = [{"role": "user", "content": "<audio>q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "a.parquet", [sound(b"R", "x"), None], messages=[talk, talk])
    first, second = (record for _, record in read_records(path, "messages"))
    assert first.turns[0].clips == (ContentClip(0, Clip(str(path), row=0, column="audio")),)
    assert second.turns[0].content == "<audio>q"


@pytest.mark.parametrize(
    "metadata", ["", "[]", "{", '{"info": {"features": [1]}}', '{"info": {"features": {"lang": 3}}}']
)
def test_numbers_of_languages_are_their_names_where_the_file_says_so(tmp_path, metadata):
    from pyarrow import parquet

    table = pyarrow.table(
        {"audio": pyarrow.array([sound(b"R", None)], SOUND), "text": ["four"], "language": [1], "lang": ["en"]}
    )
    features = {"language": {"names": ["de", "fr"], "_type": "ClassLabel"}, "text": {"_type": "Value"}}
    told = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(told, tmp_path / "a.parquet")
    assert [record.language for _, record in read_records(tmp_path / "a.parquet", "asr")] == ["fr"]
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "b.parquet")
    (problem,) = read_records(tmp_path / "b.parquet", "asr")
    assert "language: expected a string, got 1" in str(problem)


def test_other_columns_are_not_sound():
    kinds = {"audio": SOUND, "text": pyarrow.string(), "path": pyarrow.struct([("path", pyarrow.string())])}
    kinds["list"] = pyarrow.list_(SOUND)
    kinds["texts"] = pyarrow.struct([("bytes", pyarrow.string()), ("path", pyarrow.string())])
    assert sound_columns(pyarrow.schema(list(kinds.items()))) == ["audio"]


def test_rows_of_a_data_set_of_the_hub(tmp_path):
    """Two Arrow files, as the cache of `datasets` holds a large data set; the features would decode the sound."""
    features = datasets.Features({"audio": datasets.Audio(sampling_rate=16_000), "sentence": datasets.Value("string")})
    paths = []
    for part in range(2):
        path = tmp_path / f"data-{part}.arrow"
        with datasets.arrow_writer.ArrowWriter(path=str(path), features=features) as writer:
            for number in range(3):
                value = sound(b"RIFF", None) if number < 2 else sound(None, "/1.wav")
                writer.write({"audio": value, "sentence": f"{part} {number}"})
            writer.finalize()
        paths.append(str(path))
    dataset = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
    rows = list(hub_rows(dataset))
    assert [row["sentence"] for row in rows] == [f"{part} {number}" for part in range(2) for number in range(3)]
    expected = [
        Clip(path, row=row, column="audio") if row < 2 else {"path": "/1.wav"} for path in paths for row in range(3)
    ]
    assert [row["audio"] for row in rows] == expected


HUB = """
import json, sys
from erniekit.data.formats.registry import read_records
from erniekit.data.media.stored_bytes import read_bytes
clips = [record.clips[0] for _, record in read_records(sys.argv[1], "asr")]
print(json.dumps([read_bytes(clip).decode() for clip in clips if clip.row >= 0] + [clips[-1].path]))
"""


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path):
    """The cache is laid out by hand as huggingface_hub lays it out; the library that reads it is the real one."""
    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "home/hub/datasets--org--speech"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    data = repository / "snapshots" / commit / "data"
    data.mkdir(parents=True)
    (data / "9.wav").write_bytes(b"x")
    for part in range(2):
        sounds = [sound(f"RIFF{part}{number}".encode(), None) for number in range(3)]
        write(data / f"train-0000{part}-of-00002.parquet", [*sounds, sound(None, str(data / "9.wav"))])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", HUB, "org/speech"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *held, file = json.loads(done.stdout.splitlines()[-1])
    assert held == [f"RIFF{part}{number}" for part in range(2) for number in range(3)]
    assert file == str(data / "9.wav")
