"""`erniekit score` before anything is scored: what it begins with, and what it never overwrites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main, score
from erniekit.errors import DataError, UserError
from erniekit.runners.score import score_file


def test_paddle_is_opened_as_for_every_verb_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*given: Any) -> None:
        raise UserError("no PaddlePaddle is installed")

    monkeypatch.setattr(score, "import_paddle", refuse)
    assert main(["score", str(tmp_path), str(tmp_path / "data.jsonl")]) == 2
    assert "error: no PaddlePaddle is installed" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"src": ["q"], "tgt": ["a"]}\n')
    with pytest.raises(DataError, match="already exists and is never overwritten"):
        score_file(tmp_path / "model", data, data)
    with pytest.raises(DataError, match=r"there is no folder .*none; create it"):
        score_file(tmp_path / "model", data, tmp_path / "none" / "scores.jsonl")
    assert data.read_text() == '{"src": ["q"], "tgt": ["a"]}\n'
