"""Texts come from a command or a file; every bad line is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.errors import DataError
from erniekit.inference.speaking.text_files import SpokenLine, given_texts, read_texts


def test_texts_of_a_command_and_of_lines(tmp_path: Path) -> None:
    assert given_texts(["a", "b"]) == [SpokenLine("a", "--text 1"), SpokenLine("b", "--text 2")]
    path = tmp_path / "texts.txt"
    path.write_text("One.\n\n  Two. \n", encoding="utf-8")
    assert read_texts(path) == [SpokenLine("One.", f"{path}:1"), SpokenLine("Two.", f"{path}:3")]


def test_a_record_has_what_a_text_needs(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    record = {
        "text": "One.", "language": "en", "instruct": "female", "voice": "anna.wav", "voice_text": "Hi.",
        "duration": 2, "speed": None, "id": "first",
    }  # fmt: skip
    path.write_text(json.dumps(record) + "\n" + json.dumps({"text": "Two."}) + "\n")
    first, second = read_texts(path)
    assert first == SpokenLine("One.", f"{path}:1", "en", "female", tmp_path / "anna.wav", "Hi.", 2.0, None, "first")
    assert second == SpokenLine("Two.", f"{path}:2")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"text": ""}, "text: expected a text"),
        ({"language": "en"}, "text: expected a text"),
        ({"text": "a", "speed": 0}, "speed: expected a number above 0"),
        ({"text": "a", "duration": True}, "duration: expected a number above 0"),
        ({"text": "a", "duration": "2"}, "duration: expected a number above 0"),
        ({"text": "a", "lang": "en"}, "lang: expected one of text, language"),
        ({"text": "a", "id": "../x"}, "id: expected a name without a slash"),
        ({"text": "a", "id": 7}, "id: expected text"),
        (["a"], "record: expected an object"),
    ],
)
def test_bad_records_are_told_with_their_line(tmp_path: Path, record: object, told: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(DataError, match=rf"texts.jsonl:2: {told}"):
        read_texts(path)


def test_files_without_texts_and_names_twice_are_told(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}\n')
    with pytest.raises(DataError, match=r":2: id: expected one that no other text has"):
        read_texts(path)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="contains no text"):
        read_texts(tmp_path / "empty.txt")
    with pytest.raises(DataError, match=r"absent.txt"):
        read_texts(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="expected UTF-8"):
        read_texts(tmp_path / "latin.txt")
