"""Prompts from files: what is asked, what is left out, and what is refused with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.media.clip import Clip, ContentClip
from erniekit.errors import DataError
from erniekit.inference.prompts import Prompt, read_prompts


def jsonl(folder: Path, *records: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def asked(*texts: str, system: str = "") -> Conversation:
    roles = (USER, ASSISTANT)
    turns = tuple(Turn(roles[number % 2], text, trained=number % 2 == 1) for number, text in enumerate(texts))
    return Conversation(turns, system)


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffHello\n\n  What is 1 + 1? \n你好\n", encoding="utf-8")
    assert read_prompts(path) == [
        Prompt(1, asked("Hello")),
        Prompt(3, asked("What is 1 + 1?")),
        Prompt(4, asked("你好")),
    ]


QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A", "label": 0}


@pytest.mark.parametrize(
    ("record", "expected", "reference"),
    [
        ({"messages": [QUESTION]}, asked("Q"), None),
        ({"messages": [QUESTION, ANSWER]}, asked("Q"), "A"),
        (
            {"messages": [{"role": "system", "content": "S"}, QUESTION, ANSWER, QUESTION]},
            asked("Q", "A", "Q", system="S"),
            None,
        ),
        ({"src": "Q"}, asked("Q"), None),
        ({"src": ["Q"], "tgt": ["A"], "label": [0]}, asked("Q"), "A"),
        ({"src": ["Q", "R"], "tgt": ["A"], "system": "S"}, asked("Q", "A", "R", system="S"), None),
        ({"src": ["Q", "R"], "tgt": ["A", ""]}, asked("Q", "A", "R"), None),
        ({"src": ["S", "Q"], "tgt": [""], "is_system": 1}, asked("Q", system="S"), None),
        ({"instruction": "Q", "input": "R"}, asked("Q\nR"), None),
        ({"instruction": "Q", "output": "A", "history": [["P", "O"]]}, asked("P", "O", "Q"), "A"),
    ],
)
def test_the_last_answer_of_a_record_is_wanted(
    tmp_path: Path, record: dict[str, Any], expected: Conversation, reference: str | None
) -> None:
    (prompt,) = read_prompts(jsonl(tmp_path, record))
    assert (prompt.line, prompt.conversation, prompt.reference) == (1, expected, reference)


def test_records_with_recordings_are_prompts(tmp_path: Path) -> None:
    (tmp_path / "1.wav").write_bytes(b"RIFF")
    clip = Clip(str(tmp_path / "1.wav"))
    heard = Turn(USER, "", clips=(ContentClip(0, clip),))
    request = Conversation((heard,), transcribes=True)
    dialogue = Conversation((replace(heard, content="Q"),))
    marked = {"role": "user", "content": "<audio>Q"}
    part = {"role": "user", "content": [{"type": "audio", "path": "1.wav"}, {"type": "text", "text": "Q"}]}
    records: list[tuple[dict[str, Any], Conversation, str | None]] = [
        ({"audio_path": "1.wav"}, request, None),
        ({"audio_path": "1.wav", "text": ""}, request, None),
        ({"audio": "1.wav", "sentence": "four", "language": "en"}, replace(request, language="en"), "four"),
        ({"messages": [marked], "audios": ["1.wav"]}, dialogue, None),
        ({"messages": [part, ANSWER]}, dialogue, "A"),
        ({"conversations": [{"from": "human", "value": "<audio>Q"}], "audios": ["1.wav"]}, dialogue, None),
        ({"prompt": "<audio>Q", "audios": ["1.wav"]}, dialogue, None),
        ({"instruction": "<audio>Q", "audios": ["1.wav"]}, dialogue, None),
        ({"src": "<audio>Q", "audios": ["1.wav"]}, dialogue, None),
    ]
    prompts = read_prompts(jsonl(tmp_path, *(record for record, _, _ in records)))
    assert [(prompt.line, prompt.conversation, prompt.reference) for prompt in prompts] == [
        (line, expected, reference) for line, (_, expected, reference) in enumerate(records, start=1)
    ]
    (tmp_path / "other").mkdir()
    elsewhere = jsonl(tmp_path / "other", {"audio_path": "1.wav"})
    assert read_prompts(elsewhere, [str(tmp_path)])[0].conversation == request
    with pytest.raises(DataError, match=r"audio_path: expected a sound file below .*'1\.wav': no such file there"):
        read_prompts(elsewhere)


def test_every_malformed_line_is_told(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"src": "Q"}, {"text": "x"}, {"messages": [ANSWER]}, {"src": ["a", "b", "c"], "tgt": ["x"]})
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{number}" for number in (2, 3, 4)]
    assert (
        "one of messages, conversations, src, instruction, prompt, or with a recording" in lines[0]
        and "messages[0].role" in lines[1]
        and "tgt" in lines[2]
    )


def test_files_without_prompts(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    with pytest.raises(DataError, match="contains no prompt"):
        read_prompts(empty)
    with pytest.raises(DataError, match="No such file"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts(tmp_path / "latin.txt")
