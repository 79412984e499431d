"""The list of a folder's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.training import manifest
from erniekit.training.checkpoint_folder import problems
from erniekit.training.manifest import FORMAT, read_manifest, seal, unknown_format


def test_parts_that_are_sealed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "weights").write_text("of a rank")
    (tmp_path / "state").write_text("of all")
    seal(tmp_path / "rank-00000")
    read, sha256 = [], manifest.sha256
    monkeypatch.setattr(manifest, "sha256", lambda path: (read.append(path.name), sha256(path))[1])
    seal(tmp_path)
    assert sorted(read) == ["manifest.json", "state"]
    assert sorted(read_manifest(tmp_path / "manifest.json")) == [
        "rank-00000/manifest.json",
        "rank-00000/weights",
        "state",
    ]
    assert problems(tmp_path, hashes=True) == []
    (tmp_path / "rank-00000" / "weights").write_text("of a rat!")
    assert problems(tmp_path, hashes=True) == [
        "rank-00000/weights does not have the content that was written (its SHA-256 differs)"
    ]


@pytest.mark.parametrize("number", [0, FORMAT + 1, "2", None])
def test_formats_of_other_versions(tmp_path: Path, number: object) -> None:
    (tmp_path / "file").touch()
    seal(tmp_path)
    assert unknown_format(tmp_path / "manifest.json") == ""
    stored = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(stored | {"format": number}))
    assert unknown_format(tmp_path / "manifest.json") == str(number)
    (line,) = problems(tmp_path, hashes=True)
    assert line == f"it is in format {number} of another version of ERNIEKit, and this one reads up to {FORMAT}"
