"""The list of a folder's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from erniekit.manifest import FORMAT, problems, read_manifest, unknown_format
from erniekit.training.checkpoint import manifest
from erniekit.training.checkpoint.manifest import seal


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


def test_each_of_many_files_has_its_own_hash(tmp_path: Path) -> None:
    """They are hashed in threads; larger ones end later."""
    for number in range(20):
        (tmp_path / f"{number:02}").write_bytes(bytes([number]) * (20 - number) ** 4)
    seal(tmp_path)
    files = read_manifest(tmp_path / "manifest.json")
    for path in tmp_path.glob("[0-9]*"):
        content = path.read_bytes()
        assert files[path.name] == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "03").write_bytes(b"x" * 17**4)
    (tmp_path / "07").unlink()
    (tmp_path / "11").write_bytes(b"x" * 9**4)
    differs = "does not have the content that was written (its SHA-256 differs)"
    assert problems(tmp_path, hashes=True) == [f"03 {differs}", "07 is missing", f"11 {differs}"]


def test_a_file_that_cannot_be_synced_leaves_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_text("content")
    sync = manifest.sync

    def fail_for_one(path: Path) -> None:
        if path.name == "13":
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(manifest, "sync", fail_for_one)
    with pytest.raises(OSError, match="Input/output error"):
        seal(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("number", [0, FORMAT + 1, "2", None])
def test_formats_of_other_versions(tmp_path: Path, number: object) -> None:
    (tmp_path / "file").touch()
    seal(tmp_path)
    assert unknown_format(tmp_path / "manifest.json") == ""
    stored = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(stored | {"format": number}))
    assert unknown_format(tmp_path / "manifest.json") == str(number)
    (line,) = problems(tmp_path, hashes=True)
    assert (
        line == f"it has format {number} of another version of ERNIEKit, and this version reads formats up to {FORMAT}"
    )
