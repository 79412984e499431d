"""Small files are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from erniekit.training.checkpoint.manifest import atomic_write_text


def test_the_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a loss of power may leave an empty file under the final name."""
    path = tmp_path / "state.json"
    path.write_text("old")
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        events.append(f"sync {os.fstat(descriptor).st_size}")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        events.append(f"replace {path.read_text()}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    atomic_write_text(path, "newer")
    assert events == ["sync 5", "replace old"]
    assert path.read_text() == "newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
