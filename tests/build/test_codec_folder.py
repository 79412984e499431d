"""Two folders of a codec are compared by their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.build import codec_folder
from erniekit.build.codec_folder import differing_codecs


def test_codecs_of_other_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("own", "same", "other", "longer", "empty")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "empty":
            content = {"other": b"efgh", "longer": b"abcde"}.get(name, b"abcd")
            (folder / "model.safetensors").write_bytes(content)
    folders["link"] = tmp_path / "link"
    folders["link"].symlink_to(folders["own"])
    assert differing_codecs(folders["own"], folders.values()) == [folders["other"], folders["longer"]]
    assert differing_codecs(tmp_path / "gone", folders.values()) == []
    monkeypatch.setattr(codec_folder, "MOST_COMPARED", 3)
    assert differing_codecs(folders["own"], folders.values()) == [folders["longer"]]
