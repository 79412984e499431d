"""Folders in an object store are complete or absent, wherever an upload or a removal is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import CheckpointError
from erniekit.hub.object_store import ObjectFolder, StoreError, open_folder
from erniekit.manifest import MANIFEST, problems
from erniekit.training.checkpoint import stored
from erniekit.training.checkpoint.stored import (
    fetch_checkpoint,
    is_stored,
    remove_stored,
    stored_checkpoints,
    surplus,
    upload_folder,
)
from tests.object_stores import KilledError, killed_before, sealed, with_faults

NAME = "checkpoint-4"
FILES = {"config.json": "{}", "model.safetensors": "w" * 9, "rank-00000/weights.safetensors": "shard"}
OTHER = {"config.json": "{ }", "model.safetensors": "v" * 9, "old.safetensors": "gone"}
UPLOADS = len(FILES) + 1  # and the manifest
REWRITES = UPLOADS + 2  # the old manifest goes first, and the file that is no longer there


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sealed(tmp_path / "run" / NAME, FILES)


def comes_back(store: ObjectFolder, name: str, target: Path, original: Path) -> bool:
    """Whether the store has a complete folder, which then has the content of the original."""
    present = store.list()
    complete = is_stored(store, name, present)
    assert (name in stored_checkpoints(store, present)) == complete
    if not complete:
        if f"{name}/{MANIFEST}" in present:
            assert fetch_checkpoint(store, name, target, present) and not target.exists()
        return False
    assert fetch_checkpoint(store, name, target, present) == []
    assert problems(target, hashes=True) == []
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == {p.relative_to(original).as_posix(): p.read_bytes() for p in original.rglob("*") if p.is_file()}
    return True


def test_a_folder_goes_up_and_comes_back(any_url: str, folder: Path, tmp_path: Path) -> None:
    store, sizes = open_folder(any_url), list[int]()
    upload_folder(store, NAME, folder, store.list(), sizes.append)
    assert sizes == [2, 9, 5] and comes_back(store, NAME, tmp_path / "back", folder)
    faulty = with_faults(store)
    upload_folder(faulty, NAME, folder, faulty.list(), sizes.append)
    assert faulty.files.changes == 0 and len(sizes) == 3, "what is there is not uploaded again"
    remove_stored(store, NAME, store.list())
    assert store.list() == {}


@pytest.mark.parametrize("at", range(UPLOADS + 1))
def test_an_upload_that_is_killed_leaves_nothing_to_resume_from(
    store: ObjectFolder, folder: Path, tmp_path: Path, at: int
) -> None:
    killed = with_faults(store, at, killed_before)
    if at < UPLOADS:
        with pytest.raises(KilledError):
            upload_folder(killed, NAME, folder, killed.list())
        assert f"{NAME}/{MANIFEST}" not in store.list(), "it goes last"
        assert not comes_back(store, NAME, tmp_path / "back", folder)
    upload_folder(store, NAME, folder, store.list())
    assert comes_back(store, NAME, tmp_path / "again", folder)


@pytest.mark.parametrize("at", range(REWRITES + 1))
def test_a_folder_that_is_written_anew_is_the_old_one_the_new_one_or_none(
    store: ObjectFolder, folder: Path, tmp_path: Path, at: int
) -> None:
    old = sealed(tmp_path / "old" / NAME, OTHER)
    upload_folder(store, NAME, old, {})
    killed = with_faults(store, at, killed_before)
    if at < REWRITES:
        with pytest.raises(KilledError):
            upload_folder(killed, NAME, folder, killed.list())
        assert comes_back(store, NAME, tmp_path / "back", old) == (at == 0)
    upload_folder(store, NAME, folder, store.list())
    assert comes_back(store, NAME, tmp_path / "again", folder)
    assert len(store.list()) == UPLOADS, "nothing of the old one is left"


@pytest.mark.parametrize("at", range(UPLOADS))
def test_a_removal_that_is_killed_leaves_no_half(store: ObjectFolder, folder: Path, tmp_path: Path, at: int) -> None:
    upload_folder(store, NAME, folder, {})
    with pytest.raises(KilledError):
        remove_stored(with_faults(store, at, killed_before), NAME, store.list())
    assert (f"{NAME}/{MANIFEST}" in store.list()) == (at == 0), "it goes first"
    assert comes_back(store, NAME, tmp_path / "back", folder) == (at == 0)
    remove_stored(store, NAME, store.list())
    assert store.list() == {}


@pytest.mark.parametrize("at", range(REWRITES))
def test_a_model_in_the_folder_itself_is_replaced_as_one(store: ObjectFolder, tmp_path: Path, at: int) -> None:
    old, new = sealed(tmp_path / "old", OTHER), sealed(tmp_path / "new", FILES)
    store.write("training_log.jsonl", b"{}")
    upload_folder(store, "", old, store.list())
    killed = with_faults(store, at, killed_before)
    with pytest.raises(KilledError):
        upload_folder(killed, "", new, killed.list())
    assert is_stored(store, "", store.list()) == (at == 0)
    upload_folder(store, "", new, store.list())
    assert store.read("model.safetensors") == b"w" * 9 and store.read("training_log.jsonl") == b"{}"
    remove_stored(store, "", store.list())
    assert is_stored(store, "", store.list()) is False and "training_log.jsonl" in store.list()


def test_a_file_that_arrives_cut_off_keeps_the_manifest_away(store: ObjectFolder, folder: Path) -> None:
    def lost(call: Callable[[], Any]) -> None:
        call()
        store.write(f"{NAME}/config.json", b"")

    faulty = with_faults(store, 0, lost)
    with pytest.raises(StoreError, match=r"config.json did not arrive whole"):
        upload_folder(faulty, NAME, folder, {})
    assert not is_stored(store, NAME, store.list())
    upload_folder(store, NAME, folder, store.list())
    assert is_stored(store, NAME, store.list())


def test_a_manifest_of_which_half_arrives_is_none(store: ObjectFolder, folder: Path, tmp_path: Path) -> None:
    upload_folder(store, NAME, folder, {})
    whole = store.read(f"{NAME}/{MANIFEST}") or b""
    for length in range(0, len(whole) - 2, 40):
        store.write(f"{NAME}/{MANIFEST}", whole[:length])
        assert not comes_back(store, NAME, tmp_path / "back", folder)


def test_content_that_has_changed_there_is_refused(store: ObjectFolder, folder: Path, tmp_path: Path) -> None:
    upload_folder(store, NAME, folder, {})
    store.write(f"{NAME}/model.safetensors", b"x" * 9)  # of the same size
    assert is_stored(store, NAME, store.list())
    found = fetch_checkpoint(store, NAME, tmp_path / "back", store.list())
    assert found == ["model.safetensors does not have the content that was written (its SHA-256 differs)"]
    assert list(tmp_path.glob("*back*")) == [] == list(tmp_path.glob(".writing*"))


def test_a_download_that_fails_leaves_nothing_under_its_name(
    store: ObjectFolder, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_folder(store, NAME, folder, {})
    with pytest.raises(CheckpointError, match="MB free"):
        monkeypatch.setattr(stored.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3}))
        fetch_checkpoint(store, NAME, tmp_path / "back", store.list())
    assert not list(tmp_path.glob("*back*"))


@pytest.mark.parametrize(
    ("limit", "here", "removed"),
    [
        (None, [], []),
        (2, [], ["checkpoint-1", "checkpoint-2"]),
        (2, ["checkpoint-1", "checkpoint-4"], ["checkpoint-2", "checkpoint-3"]),
        (1, ["checkpoint-1", "checkpoint-4"], ["checkpoint-2", "checkpoint-3"]),
        (9, [], []),
    ],
)
def test_what_a_limit_no_longer_keeps(limit: int | None, here: list[str], removed: list[str]) -> None:
    assert surplus([f"checkpoint-{step}" for step in range(1, 5)], here, limit) == removed


def test_checkpoints_are_in_the_order_of_their_steps(store: ObjectFolder, tmp_path: Path) -> None:
    for step in (10, 9, 100):
        upload_folder(store, f"checkpoint-{step}", sealed(tmp_path / str(step), {"a": "x"}), {})
    upload_folder(store, "export-7", sealed(tmp_path / "export", {"a": "x"}), {})
    assert stored_checkpoints(store, store.list()) == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
