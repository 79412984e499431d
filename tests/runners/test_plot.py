"""`erniekit plot`: pictures and lines of text of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.cli import main
from erniekit.runners.plot import read_charts, text_lines


def run_of(folder: Path, losses: list[float], evaluated: list[float] = (), **others: float) -> Path:
    folder.mkdir(parents=True)
    records = [
        {"step": step, "loss": loss, "learning_rate": 1e-3, "tokens": 100 * step, "tokens_per_second": 50.0} | others
        for step, loss in enumerate(losses, 1)
    ]
    records += [{"step": step, "eval_loss": loss} for step, loss in enumerate(evaluated, len(losses) + 1)]
    (folder / "training_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_several_runs_as_a_picture_and_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_of(tmp_path / "sft", [5.0 / step for step in range(1, 80)], [0.5], grad_norm=1.0)
    second = run_of(tmp_path / "lo$ra", [4.0, 3.0])
    picture = tmp_path / "new" / "runs.png"
    assert main(["plot", str(first), str(second), "--output", str(picture), "--x", "tokens"]) == 0
    shown = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in shown
    for words in ("loss over tokens", "learning rate", "tokens/s", "gradient norm", "sft", "lo$ra", "sft, evaluation"):
        assert words in shown
    assert "\x1b" not in shown
    assert main(["plot", str(first), str(second), "--output", str(picture), "--no-text"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {picture}"]


def test_charts_hold_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path / "a", [2.0 + (-1) ** step for step in range(100)], [1.5], token_accuracy=0.5)
    (chart,) = read_charts([folder], ["loss"])
    assert not chart.logarithmic and len(chart.curves[0].trained) == len(chart.curves[0].mean) == 100
    assert (
        max(value for _, value in chart.curves[0].mean[5:-5]) < 2.5 < max(value for _, value in chart.curves[0].trained)
    )
    assert read_charts([folder], ["loss"], smooth=1)[0].curves[0].mean == []
    smooth = read_charts([folder], ["loss"], "steps", 50)[0].curves[0].mean
    assert max(abs(value - 2.0) for _, value in smooth) < 0.1
    assert [chart.title for chart in read_charts([folder])] == ["loss", "learning rate", "tokens/s"]
    assert [chart.title for chart in read_charts([folder], ["token_accuracy"])] == ["token accuracy"]
    assert read_charts([run_of(tmp_path / "b", [5.0, 0.1])], ["loss"])[0].logarithmic
    assert main(["plot", str(folder), "--figures", "loss,token_accuracy", "--x", "hours", "--smooth", "20"]) == 0
    shown = capsys.readouterr().out
    assert "loss over hours" in shown and "token accuracy over hours" in shown and "learning rate" not in shown


def test_runs_of_the_same_name_are_told_by_their_paths(tmp_path: Path) -> None:
    folders = [run_of(tmp_path / name / "out", [2.0, 1.0]) for name in ("a", "b")]
    assert [curve.run for curve in read_charts(folders)[0].curves] == [str(folder) for folder in folders]


def test_text_fits_the_width(tmp_path: Path) -> None:
    charts = read_charts([run_of(tmp_path / "a", [2.0, 1.5, 1.0])], ["loss"])
    (text,) = text_lines(charts, 60)
    assert 10 < len(text.splitlines()) <= 16 and max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["a", "--figures", "los"], "no run has a figure of this name; there are loss, learning_rate"),
        (["a", "--output", "x.svg"], "expected a name that ends in .png"),
        (["a", "--smooth", "0"], "expected a number of records of at least 1"),
        (["a", "--no-text"], "leaves nothing to do"),
        (["a", "--x", "days"], "invalid choice"),
        ([], "OUTPUT"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "a", [2.0])
    assert main(["plot", *words]) == 2
    assert told in capsys.readouterr().err
