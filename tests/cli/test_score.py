"""`erniekit score`: what is wrong with its words, and that Paddle is imported as every verb imports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.cli import main, score
from erniekit.errors import UserError


@pytest.mark.parametrize("device", ["abacus", "gpu:x", "cpu:0"])
def test_a_device_that_is_none_is_refused(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "model", "data.jsonl", "--device", device]) == 2
    assert f"got {device}" in capsys.readouterr().err


def test_a_missing_paddle_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise UserError("PaddlePaddle is not installed")

    monkeypatch.setattr(score, "import_paddle", missing)
    assert main(["score", str(tmp_path), str(tmp_path / "data.jsonl")]) == 2
    assert "PaddlePaddle is not installed" in capsys.readouterr().err
