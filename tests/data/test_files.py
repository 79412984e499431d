"""Tables and plain texts as data files, encodings that are not UTF-8, and what is no file at all."""

from __future__ import annotations

import os

import pytest

from erniekit.data.conversation import Conversation, PlainText, Source, Turn
from erniekit.data.formats import encodings
from erniekit.data.formats.files import read_values
from erniekit.data.formats.problems import Effect, RecordProblem
from erniekit.data.formats.registry import read_records, recognise
from erniekit.data.open_dataset import open_dataset
from erniekit.errors import DataError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def dialogue(question, answer, system=""):
    return Conversation((Turn("user", question), Turn("assistant", answer, True)), system)


# Tables


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.csv", ";"), ("a.tsv", "\t"), ("A.CSV", ",")])
def test_the_columns_of_a_table_are_fields(write, name, mark):
    rows = [["prompt", "completion", "system"], ["q", '"several\nlines, quoted; ""so"""', ""], ["r", "b", "s"]]
    path = write(name, "\r\n".join(mark.join(row) for row in rows))
    assert recognise(path, "erniekit") == "prompt_completion"
    assert list(read_records(path, "prompt_completion")) == [
        (2, dialogue("q", 'several\nlines, quoted; "so"')),
        (4, dialogue("r", "b", "s")),
    ]


def test_a_table_of_texts_with_a_byte_order_mark(write):
    path = write("a.csv", b"\xef\xbb\xbftext\nM\xc3\xbchle\n\nFluss\n")
    assert list(read_records(path, "text")) == [(2, PlainText("Mühle")), (4, PlainText("Fluss"))]


def test_columns_that_no_format_has(write):
    problem = recognise(write("a.csv", "question,answer\nq,a\n"), "erniekit")
    assert "got the fields answer, question, which no format has" in str(problem)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "a.csv: file: expected at least one record, got an empty file"),
        ("prompt,completion\n", "a.csv: file: expected at least one record, got an empty file"),
        ("prompt,prompt\nq,a\n", "a.csv:1: columns: expected a different name for each column"),
        ("prompt,completion\nq,a,b\n", "a.csv:2: row: expected 2 cells, as the first row has, got 3"),
        ('prompt,completion\nq,"a\n', "a.csv:2: row: expected cells in closed quotation marks"),
        ("prompt,completion\nq,a\nr,m\xfcde\n".encode("latin-1"), "a.csv:3: encoding: expected UTF-8, got byte 0xfc"),
        ("prompt,completion\nq,a\n".encode("utf-16"), "a.csv: encoding: expected UTF-8, got UTF-16"),
    ],
)
def test_malformed_tables(write, content, told):
    path = write("a.csv", content)
    problems = [item for item in read_values(path) if isinstance(item, RecordProblem)]
    assert len(problems) == 1
    assert str(problems[0]).startswith(f"{path.parent}/{told}")


def test_a_cell_may_be_long(write):
    path = write("a.csv", f"text\n{'word ' * 100_000}\n")
    ((_, record),) = read_records(path, "text")
    assert len(record.text) == 500_000


# Plain texts


def test_every_line_of_a_text_file_is_a_document(write):
    path = write("a.txt", "\ufeffone \r\n\n  zwei, ä\nthree")
    assert list(read_records(path, "text")) == [
        (1, PlainText("one ")),
        (3, PlainText("  zwei, ä")),
        (4, PlainText("three")),
    ]


@pytest.mark.parametrize(
    "content",
    ['{"text": "a"}\n{"text": "b"}\n', '\n[{"text": "a"},\n{"text": "b"}]', '[\n{"text": "a"}, {"text": "b"}]'],
)
def test_a_text_file_of_json_is_read_as_json(write, content):
    assert [record.text for _, record in read_records(write("a.txt", content), "text")] == ["a", "b"]


def test_a_text_that_begins_like_json_is_a_text(write):
    assert [record.text for _, record in read_records(write("a.txt", "{sic}\n[1] source"), "text")] == [
        "{sic}",
        "[1] source",
    ]


def test_a_text_file_is_for_pre_training(write):
    problem = recognise(write("a.txt", "one\ntwo\n"), "erniekit")
    assert "got what looks like plain text: write stage: PT" in str(problem)


# Encodings


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_gbk_is_named_once_with_the_command_that_converts_it(write, name):
    texts = ["今天天气很好，我们去公园。", "河水流过老磨坊。"]
    lines = {
        "a.jsonl": [f'{{"text": "{text}"}}' for text in texts], "a.csv": ["text", *texts], "a.txt": texts,
    }[name]  # fmt: skip
    path = write(name, "\n".join(lines).encode("gbk"))
    (problem,) = read_records(path, "text")
    assert f"got GBK (Chinese): convert it with `iconv -f GB18030 -t UTF-8 {path} > new-file`" in str(problem)
    assert problem.effect is Effect.STOP


@pytest.mark.parametrize("text", ["müde", "élève", "naïve café", "Århus", "été"])
def test_latin_text_is_not_taken_for_chinese(write, text):
    path = write("a.jsonl", f'{{"text": "{text}"}}\n'.encode("latin-1") + b'{"text": "b"}\n')
    problem, _ = read_records(path, "text")
    assert "GBK" not in str(problem) and "at byte offset" in problem.got


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "a"}'.encode("utf-16-le"), "UTF-16: convert it with `iconv -f UTF-16LE"),
        ('[{"text": "a"}]'.encode("utf-16-be"), "UTF-16: convert it with `iconv -f UTF-16BE"),
        (b"\x1f\x8b\x08", "gzip: convert it with `gunzip"),
        (b"PK\x03\x04", "zip: convert it with `unzip"),
        (b"PAR1....", "Parquet: convert it with `mv"),
    ],
)
def test_files_that_are_not_text_are_named(write, content, told):
    (problem,) = read_records(write("a.jsonl", content), "text")
    assert told in str(problem)


def test_windows_line_ends_are_no_content(write):
    path = write("a.jsonl", b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert list(read_records(path, "text")) == [(1, PlainText("a")), (3, PlainText("b"))]


def test_a_file_that_is_no_json_is_one_problem(write):
    (problem,) = read_records(write("data.jsonl", "question,answer\nq,a\nr,b\n"), "erniekit")
    assert "expected JSON lines or a JSON array (the name of a table ends in .csv" in str(problem)


def test_a_line_without_an_end_is_not_read_into_memory(write, monkeypatch):
    monkeypatch.setattr(encodings, "MAX_RECORD_BYTES", 1000)
    for path in (write("a.jsonl", b'{"text": "a"}\n{"text": "' + b"x" * 5000), write("a.txt", b"a\n" + b"x" * 5000)):
        _, problem = read_records(path, "text")
        assert str(problem).startswith(f"{path}:2: line: expected at most")


# What is no file


@pytest.fixture
def refusal(tokenizer, template, tmp_path):
    def refusal(path):
        with pytest.raises(DataError) as caught:
            open_dataset([Source(path, "text")], tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "cache")
        return str(caught.value)

    return refusal


def test_a_pipe_a_device_and_a_folder_are_refused_without_opening_them(refusal, tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    assert "file: expected a file, because data is read several times, got a pipe: write it to a file" in refusal(pipe)
    assert "got a device or socket" in refusal("/dev/zero")
    assert "got a folder: name the files in it" in refusal(tmp_path)
    assert "got no such file. Paths are relative to the current folder: " in refusal(tmp_path / "none.jsonl")
    assert "x" * 300 in refusal(tmp_path / ("x" * 300))
