"""What URLs name, downloaded once into the cache: files, folders, models; changed, cut off, incomplete or hostile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from erniekit.errors import ModelFileError
from erniekit.hub import fetched as module
from erniekit.hub.cache import find_local_folder
from erniekit.hub.download import find_model_folder
from erniekit.hub.fetched import FETCHED, RUN_FILE, fetch, fetch_model, fetched, forget_models
from erniekit.hub.object_store import Moved, ObjectFolder, StoreError, open_folder
from erniekit.training.checkpoint.stored import upload_folder
from tests.object_stores import sealed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ERNIEKIT_CACHE", str(tmp_path / "cache"))
    forget_models()
    yield tmp_path / "cache"
    forget_models()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are downloaded."""
    names: list[str] = []
    download = ObjectFolder.download

    def counted(self: ObjectFolder, name: str, path: Path, moved: Moved | None = None) -> None:
        names.append(name)
        download(self, name, path, moved)

    monkeypatch.setattr(ObjectFolder, "download", counted)
    return names


def test_a_file_is_downloaded_once_until_it_changes(any_url: str, own_cache: Path, downloads: list[str]) -> None:
    store, url = open_folder(any_url), f"{any_url}/train.jsonl"
    assert fetched(url, own_cache) is None
    store.write("train.jsonl", b"one\n")
    first = fetch(url, own_cache)
    assert first.name == "train.jsonl" and first.read_text() == "one\n"
    assert fetch(url, own_cache) == first == fetched(url, own_cache) and downloads == [""]
    store.write("train.jsonl", b"two\n")
    second = fetch(url, own_cache)
    assert second != first and second.read_text() == "two\n" and first.read_text() == "one\n"
    assert fetched(url, own_cache) == second


def test_a_folder_comes_as_a_whole_and_goes_on_after_an_interruption(
    any_url: str, own_cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_folder(any_url)
    for name in ("a.wav", "sub/b.wav", "sub/c.wav"):
        store.write(f"clips/{name}", name.encode())
    counted = ObjectFolder.download

    def cut_off(self: ObjectFolder, name: str, path: Path, moved: Moved | None) -> None:
        if len(downloads) == 2:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        counted(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectFolder, "download", cut_off)
        with pytest.raises(KeyboardInterrupt):
            fetch(f"{any_url}/clips", own_cache)
    assert fetched(f"{any_url}/clips", own_cache) is None
    folder = fetch(f"{any_url}/clips", own_cache)
    assert len(downloads) == 3, "what had come is not downloaded again"
    names = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert names == {name: name for name in ("a.wav", "sub/b.wav", "sub/c.wav")}


def test_what_is_not_there(store: ObjectFolder, own_cache: Path) -> None:
    with pytest.raises(StoreError, match=r"memory://.*/none: there is no such file or folder, or it is empty"):
        fetch(f"{store.url}/none", own_cache)


def test_a_file_that_is_being_written_is_refused(store: ObjectFolder, own_cache: Path, monkeypatch: Any) -> None:
    store.write("a", b"12345")
    monkeypatch.setattr(ObjectFolder, "download", lambda self, name, path, moved: path.write_bytes(b"123"))
    with pytest.raises(StoreError, match="3 bytes have come, and the store says 5"):
        fetch(f"{store.url}/a", own_cache)


def test_names_that_leave_the_folder_are_refused(store: ObjectFolder, own_cache: Path) -> None:
    store.write("harmless", b"x")
    store.files.store[f"{store.root}/../../evil"] = store.files.store[f"{store.root}/harmless"]
    with pytest.raises(StoreError, match=r"leaves the folder; nothing is downloaded"):
        fetch(store.url, own_cache)


def test_a_full_disk_is_told_before_anything_is_downloaded(
    store: ObjectFolder, own_cache: Path, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", b"12345")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4}))
    with pytest.raises(StoreError, match="0 MB are to be downloaded"):
        fetch(f"{store.url}/a", own_cache)
    assert downloads == []


def test_ranks_take_what_their_launcher_has_fetched(
    store: ObjectFolder, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("a", b"one")
    before = fetch(f"{store.url}/a", own_cache)
    store.write("a", b"two")
    monkeypatch.setenv(FETCHED, "1")
    assert fetch(f"{store.url}/a", own_cache) == before
    store.write("b", b"new")
    assert fetch(f"{store.url}/b", own_cache).read_text() == "new", "what it has not fetched is fetched"


MODEL = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights", "modeling.py": "evil()"}


def test_a_model_comes_in_two_parts_without_code(store: ObjectFolder, downloads: list[str]) -> None:
    for name, text in {**MODEL, "pytorch_model.bin": "pickle", "other/model.safetensors": "x"}.items():
        store.write(name, text.encode())
    small = find_model_folder(store.url, None, weights=False)
    assert sorted(path.name for path in small.iterdir()) == ["config.json", "tokenizer.json"]
    assert find_local_folder(store.url, None) == small
    whole = find_model_folder(store.url, None)
    assert whole == small, "so that nothing that depends on the folder changes"
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert len(downloads) == 3 and find_model_folder(store.url, None) == whole


def test_a_run_is_a_model_once_its_manifest_is_there(store: ObjectFolder, tmp_path: Path) -> None:
    files = {"config.json": "{}", "model.safetensors": "new", "optimizer.safetensors": "state"}
    folder = sealed(tmp_path / "model", files)
    store.write(RUN_FILE, b"{}")
    store.write("model-00001-of-00002.safetensors", b"of an earlier model")
    store.write("training_config.yaml", b"stage: SFT")
    upload_folder(store, "checkpoint-5", folder, store.list())
    with pytest.raises(ModelFileError, match=r"has no complete model.*\n.*It holds checkpoint-5; name one of these"):
        fetch_model(store.url, weights=True)
    upload_folder(store, "", folder, store.list())
    found = fetch_model(store.url, weights=True)
    names = ["config.json", "manifest.json", "model.safetensors", "training_config.yaml"]
    assert sorted(path.name for path in found.iterdir()) == names
    checkpoint = fetch_model(f"{store.url}/checkpoint-5", weights=True)
    assert sorted(path.name for path in checkpoint.iterdir()) == names[:3]


def test_a_model_of_which_a_file_is_missing_is_refused(store: ObjectFolder, tmp_path: Path) -> None:
    upload_folder(store, "", sealed(tmp_path / "model", {"config.json": "{}", "model.safetensors": "w"}), {})
    store.remove("model.safetensors")
    with pytest.raises(ModelFileError, match=r"is not complete: model.safetensors is missing or of another size"):
        fetch_model(store.url, weights=False)


def test_a_checkpoint_without_a_manifest_is_no_model(store: ObjectFolder) -> None:
    store.write("checkpoint-4/config.json", b"{}")
    store.write("checkpoint-4/manifest.json", b'{"files": {"config.json": {"si')  # cut off
    with pytest.raises(ModelFileError, match="has no complete model"):
        fetch_model(f"{store.url}/checkpoint-4", weights=True)


def test_a_manifest_of_another_program_is_a_file_as_any_other(store: ObjectFolder) -> None:
    store.write("config.json", b"{}")
    store.write("manifest.json", json.dumps({"name": "an app"}).encode())
    assert (fetch_model(store.url, weights=False) / "manifest.json").is_file()
