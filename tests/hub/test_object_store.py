"""Folders of object stores: every operation, repeated where the store fails, with errors that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.hub import object_store
from erniekit.hub.object_store import ObjectFolder, StoreError, lacking_package, open_folder, short_reason
from tests.object_stores import with_faults


def test_every_operation(any_url: str, tmp_path: Path) -> None:
    folder = open_folder(any_url)
    assert folder.list() == {} and folder.file("a") is None and folder.read("a") is None
    folder.remove("a")
    (tmp_path / "here").write_bytes(b"content")
    folder.upload(tmp_path / "here", "sub/a")
    folder.write("b", b"12")
    assert {name: file.size for name, file in folder.list().items()} == {"sub/a": 7, "b": 2}
    assert {name: file.size for name, file in folder.list("sub").items()} == {"sub/a": 7}
    stored = folder.file("b")
    assert stored is not None and stored.size == 2 and stored.tag
    assert folder.file("sub") is None, "a folder is no file"
    folder.download("sub/a", tmp_path / "new/there")
    assert (tmp_path / "new/there").read_bytes() == b"content" == folder.read("sub/a")
    folder.remove("b")
    assert list(folder.list()) == ["sub/a"]
    assert open_folder(f"{any_url}/sub/a").file() is not None and open_folder(f"{any_url}/sub/a").list() == {}


def test_a_file_that_changes_has_another_tag(any_url: str) -> None:
    folder = open_folder(any_url)
    folder.write("a", b"1")
    first = folder.list()["a"]
    folder.write("a", b"2")
    assert folder.list()["a"] != first and folder.list()["a"] == folder.list()["a"]


class _FailingFiles:
    """A file system whose uploads fail so many times."""

    def __init__(self, files: Any, times: int, error: Exception) -> None:
        self._files, self._left, self._error, self.asked = files, times, error, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def put_file(self, *arguments: Any, **options: Any) -> None:
        self.asked += 1
        if self._left:
            self._left -= 1
            raise self._error
        self._files.put_file(*arguments, **options)


def upload_with(store: ObjectFolder, tmp_path: Path, times: int, error: Exception) -> _FailingFiles:
    files = _FailingFiles(store.files, times, error)
    (tmp_path / "a").write_text("x")
    try:
        ObjectFolder(store.url, files, store.root, store.waits).upload(tmp_path / "a", "a")
    except StoreError as failed:
        files.failed = str(failed)
    return files


def test_a_store_that_fails_for_a_while_is_asked_again(store: ObjectFolder, tmp_path: Path) -> None:
    assert upload_with(store, tmp_path, 2, ConnectionError("reset")).asked == 3
    assert store.read("a") == b"x"


def test_a_store_that_goes_on_failing_is_told_without_secrets(
    store: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hUsh1234567")
    error = RuntimeError("POST https://h/x?X-Amz-Signature=abc with hUsh1234567: 503")
    files = upload_with(store, tmp_path, 9, error)
    assert files.asked == 3
    assert files.failed.startswith(
        f"could not upload {store.url}/a: RuntimeError: POST https://h/x?X-Amz-Signature=*** with ***: 503\n"
    )


def test_who_transfers_is_told_how_much_has_gone(store: ObjectFolder, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(20_000_000))
    up, down = list[int](), list[int]()
    store.upload(tmp_path / "a", "a", up.append)
    store.download("a", tmp_path / "b", down.append)
    for told in (up, down):
        assert len(told) > 2 and told == sorted(told) and told[-1] == 20_000_000


@pytest.mark.parametrize("error", [PermissionError("Forbidden"), FileNotFoundError("The bucket does not exist")])
def test_what_will_not_change_is_not_asked_again(store: ObjectFolder, tmp_path: Path, error: OSError) -> None:
    files = upload_with(store, tmp_path, 9, error)
    assert files.asked == 1
    assert ("docs/object-storage.md" if isinstance(error, PermissionError) else "bucket exists") in files.failed


def test_a_file_that_is_no_longer_here_is_no_error_of_the_store(store: ObjectFolder, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.upload(tmp_path / "none", "a")
    with pytest.raises(StoreError, match=r"could not download memory://.*/none: FileNotFoundError"):
        with_faults(store).download("none", tmp_path / "there")


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "is_importable", lambda module: module == "fsspec")
    assert lacking_package("s3://b/run") == (
        "URLs of Amazon S3, and stores that speak its protocol need s3fs: pip install 'erniekit[storage]' s3fs"
    )
    assert lacking_package("file:///mnt") == ""
    with pytest.raises(StoreError, match=r"gs://b/run: URLs of Google Cloud Storage need gcsfs: pip install"):
        open_folder("gs://b/run")
    monkeypatch.setattr(object_store, "is_importable", lambda module: False)
    assert lacking_package("memory://b") == "URLs of object stores need fsspec: pip install 'erniekit[storage]'"


def test_errors_are_one_line() -> None:
    assert short_reason(ValueError("a\n  b")) == "ValueError: a b" and short_reason(TimeoutError()) == "TimeoutError"
