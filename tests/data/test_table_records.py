"""Parquet files and data sets of the Hugging Face hub, read from files in the hub's layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.data.conversation import Source
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.registry import read_records
from erniekit.data.formats.table import is_hub_dataset
from erniekit.data.open_dataset import open_dataset
from erniekit.errors import DataError

RECORDS = [{"src": [f"question {number}"], "tgt": [f"answer {number}"]} for number in range(600)]


def write_parquet(path: Path, records: list[dict]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=100)
    return path


def test_a_parquet_file_gives_the_samples_of_the_same_jsonl(tmp_path, write_jsonl, tokenizer, template):
    path = write_parquet(tmp_path / "data.parquet", RECORDS)
    options = {"max_seq_len": 64, "cache_dir": tmp_path / "cache"}
    ours = open_dataset([Source(path, "erniekit")], tokenizer, template, **options)
    theirs = open_dataset([Source(write_jsonl(RECORDS), "erniekit")], tokenizer, template, **options)
    assert len(ours) == len(theirs) == 600
    for index in range(600):
        assert ours.sample(index).input_ids.tolist() == theirs.sample(index).input_ids.tolist()
    assert ours.location(599) == f"{path}:600"


def test_columns_without_a_value_are_as_if_they_were_not_there(tmp_path):
    records = [{"src": "q", "tgt": "a", "system": None}, {"src": "q", "tgt": "a", "system": "be brief"}]
    path = write_parquet(tmp_path / "data.parquet", records)
    assert [record.system for _, record in read_records(path, "erniekit")] == ["", "be brief"]


def test_problems_are_told_with_file_and_row(tmp_path):
    path = write_parquet(tmp_path / "data.parquet", [RECORDS[0], {"src": ["q"], "tgt": None}])
    _, problem = read_records(path, "erniekit")
    assert isinstance(problem, RecordProblem) and str(problem).startswith(f"{path}:2: tgt")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    (problem,) = read_records(path, "erniekit")
    assert "a readable Parquet file" in str(problem)
    (problem,) = read_records(tmp_path / "gone.parquet", "erniekit")
    assert "no such file" in str(problem)
    (problem,) = read_records(write_parquet(tmp_path / "empty.parquet", RECORDS[:1]), "text")
    assert problem.field == "text"


def test_what_names_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("org/name", "org/name:test", "org/my-set_1.0:config/train"):
        assert is_hub_dataset(name)
    for name in ("data/name", "org/name.jsonl", "org/name.parquet", "/org/name", "name", "a/b/c", "../org/name"):
        assert not is_hub_dataset(name)


HUB = """
import json, sys
from pathlib import Path
from erniekit.data.formats.registry import read_records
print(json.dumps([str(item) for item in read_records(sys.argv[1], "erniekit")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [("org/quiz:train", "answer 0"), ("org/quiz:test", "answer 9")])
def test_a_data_set_in_the_hubs_cache_is_read_offline(tmp_path, name, expected):
    """The cache is laid out by hand as huggingface_hub lays it out; the library that reads it is the real one."""
    commit = "0123456789012345678901234567890123456789"
    repository = tmp_path / "home/hub/datasets--org--quiz"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    data = repository / "snapshots" / commit / "data"
    write_parquet(data / "train-00000-of-00001.parquet", RECORDS[:9])
    write_parquet(data / "test-00000-of-00001.parquet", RECORDS[9:12])
    lines = _read_offline(name, tmp_path)
    assert expected in lines[0] and len(lines) == (9 if name.endswith("train") else 3)


@pytest.mark.slow
def test_without_a_network_the_error_says_what_to_do(tmp_path):
    (line,) = _read_offline("org/nowhere", tmp_path)
    assert "hf download org/nowhere --repo-type dataset" in line


def _read_offline(name: str, folder: Path) -> list[str]:
    import os

    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", HUB, name], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_sources_that_cannot_be_reached_are_one_problem_among_others(tmp_path, tokenizer, template, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when the library was imported
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"org/nowhere: data set"):
        open_dataset(
            [Source(Path("org/nowhere"), "erniekit")], tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "c"
        )
