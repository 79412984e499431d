"""What a model folder says of texts is read back, and damage is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.text_reading import Pace, TextReading, read_text_reading, text_reading_of, write_text_reading
from erniekit.errors import DataError


@pytest.mark.parametrize(
    "reading",
    [
        TextReading(),
        TextReading("characters", Pace(0.125, 0.25, {"a": 0.5, "\u00df": -0.25})),
        TextReading("phonemes", None, False, 0.75),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, reading: TextReading) -> None:
    assert read_text_reading([tmp_path]) is None
    write_text_reading(tmp_path, reading)
    assert read_text_reading([tmp_path / "absent", tmp_path]) == reading


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "speech.json").write_text(damaged())
    assert read_text_reading([tmp_path]) == TextReading()


def test_the_parameters_of_a_run_come_first(tmp_path: Path) -> None:
    assert text_reading_of({}, [tmp_path]) is None
    assert text_reading_of({"stage": "TTS"}, [tmp_path]) == TextReading()
    write_text_reading(tmp_path, TextReading("characters", Pace(0.125, 0.25), False))
    assert text_reading_of({}, [tmp_path]) == TextReading("characters", Pace(0.125, 0.25), False)
    run = {"text_frontend": "phonemes", "language_probability": 0.8}
    assert text_reading_of(run, [tmp_path]) == TextReading("phonemes", Pace(0.125, 0.25), True)


def damaged(**values: Any) -> str:
    return json.dumps({"text_frontend": "tokenizer", "pace": None, "tells_language": True} | values)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "nothing",
        damaged(text_frontend="letters"),
        damaged(text_frontend=["tokenizer"]),
        damaged(pace="fast"),
        damaged(pace={"seconds_per_letter": -1.0, "seconds_besides": 0.0}),
        damaged(pace={"seconds_per_letter": 0.1, "seconds_besides": 0.0, "letters": 3}),
        damaged(pace={"seconds_per_letter": 0.1, "seconds_besides": 0.0, "letters": {"a": "long"}}),
        damaged(tells_language="yes"),
        damaged(longest_prompt="3"),
        damaged(longest_prompt=-3.0),
        "[" * 10_000,
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "speech.json").write_text(content)
    with pytest.raises(DataError, match=r"speech.json: expected text_frontend, one of tokenizer, characters, phonemes"):
        read_text_reading([tmp_path])
