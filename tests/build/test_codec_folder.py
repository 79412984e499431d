"""Two folders of a codec are compared by their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from erniekit.build import codec_folder
from erniekit.build.codec_folder import codec_candidates, differing_codecs
from erniekit.hub.fetched import fetch
from erniekit.hub.object_store import ObjectFolder


def test_the_codec_beside_data_that_was_downloaded(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(codec_folder, "read_facts", lambda home: str(home) if (home / "codes.json").is_file() else None)
    monkeypatch.setattr(codec_folder, "codec_folder", lambda home, facts: home / "codec")
    store.write("codes/codes.json", b"{}")
    run = {"train_dataset_path": [f"{store.url}/codes"]}
    assert codec_candidates([], run) == []
    here = fetch(f"{store.url}/codes", tmp_path / "cache")
    assert codec_candidates([], run) == [here / "codec"]


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
