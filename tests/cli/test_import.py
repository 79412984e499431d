"""`erniekit import`: the command line of both programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from erniekit.cli import main
from erniekit.config import Config
from tests.config.imports.test_omnivoice import DATA, FINETUNE
from tests.config.imports.test_vall_e import ADAMW, SHIPPED


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    training, data, config = tmp_path / "train.json", tmp_path / "data.json", tmp_path / "config.yaml"
    training.write_text(json.dumps(FINETUNE), encoding="utf-8")
    data.write_text(json.dumps(DATA), encoding="utf-8")
    config.write_text(yaml.safe_dump(SHIPPED), encoding="utf-8")
    return str(training), str(data), str(config)


def test_both_programs_are_printed(files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    training, data, config = files
    assert main(["import", "omnivoice", training, data, "steps=7"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# Written by `erniekit import omnivoice {training} {data} steps=7`.\n")
    assert yaml.safe_load(text)["max_steps"] == 7
    assert main(["import", "vall-e", config, *ADAMW]) == 0
    text = capsys.readouterr().out
    assert '#     "model_type": "vall_e",' in text and yaml.safe_load(text)["tts_objective"] == "ar_nar"


def test_files_are_written_and_never_replaced(
    files: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, folder = tmp_path / "ours.yaml", tmp_path / "model"
    words = ["import", "vall-e", files[2], *ADAMW, "--output", str(output), "--model-folder", str(folder)]
    assert main(words) == 0
    assert f"{output}: written" in capsys.readouterr().out
    assert Config.load(output, ["train_dataset_path=a.jsonl"]).basic.model_name_or_path == str(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "vall_e"
    before = output.read_bytes()
    assert main(words) == 2
    assert "exists; remove it, or name another file" in capsys.readouterr().err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["omnivoice", "a.json"], "omnivoice takes two files, TRAIN.json and DATA.json, not 1"),
        (["vall-e", "a.yaml", "b.yaml"], "vall-e takes one file, CONFIG.yaml, not 2"),
        (["omnivoice", "a", "b", "--model-folder", "m"], "--model-folder is for vall-e"),
        (["trl", "a"], "invalid choice: 'trl'"),
        (["vall-e", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_wrong_words_are_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", *words]) == 2
    assert told in capsys.readouterr().err


def test_an_unknown_key_has_its_file_and_line(
    files: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{\n  "steps": 3,\n  "stepz": 5\n}', encoding="utf-8")
    assert main(["import", "omnivoice", str(bad), files[1]]) == 2
    assert f"{bad}:3: `stepz`: unknown key" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told(
    files: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for words in (
        ["--output", str(tmp_path / "file" / "ours.yaml")],
        ["--model-folder", str(tmp_path / "file" / "model")],
    ):
        assert main(["import", "vall-e", files[2], *ADAMW, *words]) == 2
        assert "cannot be written: " in capsys.readouterr().err
