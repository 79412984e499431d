"""`erniekit transcribe`: words, files, exit codes, and one real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from erniekit.cli import main
from tests.inference.listener import listener_folder, write_sound


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener_folder(tmp_path_factory.mktemp("listener"))


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    write_sound(tmp_path / "in/a.wav", 0.9)
    write_sound(tmp_path / "in/deep/b.flac", 0.2, seed=1, rate=8000)
    return tmp_path / "in"


def test_a_folder_of_recordings(
    model: Path, recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["transcribe", str(model), str(recordings), "--max-new-tokens", "4", "--output", str(tmp_path / "out")]
    assert main([*words, "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "2 of 2" in shown.err and "x real time" in shown.err and "2 recordings" in shown.err
    record = json.loads((tmp_path / "out/a.json").read_text())
    assert record["seconds"] == pytest.approx(0.9, abs=1e-3) and len(record["chunks"]) >= 3
    assert (tmp_path / "out/deep/b.json").is_file()
    before = (tmp_path / "out/a.json").stat().st_mtime_ns
    (recordings / "bad.mp3").write_text("no sound")
    write_sound(recordings / "c.wav", 0.1)
    assert main([*words, "--format", "json"]) == 2
    shown = capsys.readouterr()
    assert "2 of 4 transcripts are there already" in shown.err
    assert "error: 1 recording cannot be transcribed" in shown.err.split("c.wav")[-1] and "bad.mp3" in shown.err
    assert (tmp_path / "out/c.json").is_file() and (tmp_path / "out/a.json").stat().st_mtime_ns == before


def test_one_file_chooses_its_format(
    model: Path, recordings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["transcribe", str(model), str(recordings / "a.wav"), "--max-new-tokens", "4", "--chunk-seconds", "0.3"]
    assert main([*words, "--output", str(tmp_path / "a.vtt")]) == 0
    assert (tmp_path / "a.vtt").read_text().startswith("WEBVTT\n")
    assert main([*words, "--output", str(tmp_path / "a.vtt")]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert main([*words, "--format", "srt"]) == 0
    assert capsys.readouterr().out.startswith("1\n00:00:00,000 --> ")
    assert main([*words, "--chunk-seconds", "0"]) == 2
    assert "expected seconds" in capsys.readouterr().err


def test_a_model_of_text_is_refused(tiny_base: Path, recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transcribe", str(tiny_base), str(recordings)]) == 2
    assert "no audio encoder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process(model: Path, recordings: Path, tmp_path: Path) -> None:
    words = [str(model), str(recordings), "--max-new-tokens", "4", "--asr-prompt", "Write:", "--output", "out"]
    command = [sys.executable, "-m", "erniekit", "transcribe", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.txt")) == ["a.txt", "b.txt"]
    assert "Traceback" not in done.stderr
