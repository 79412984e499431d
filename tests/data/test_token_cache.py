from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from erniekit.data.templates.ernie import Sample
from erniekit.data.token_cache import ABANDONED_AFTER_S, ARRAYS, MANIFEST, open_or_build
from erniekit.errors import DataError


def sample(*tokens: int) -> Sample:
    ids = np.array(tokens, dtype=np.int32)
    return Sample(ids, ids + 1)


class Builder:
    """Counts how often it had to build."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, writer):
        self.calls += 1
        writer.append([sample(1, 2, 3), sample(4)], [7, 9])
        writer.append([], [])
        writer.append([sample(5, 6)], [12])
        return {"read": 3}


def test_what_is_written_is_read_back_and_built_once(tmp_path):
    build = Builder()
    for _ in range(2):
        arrays = open_or_build(tmp_path / "new" / "key", build)
        assert arrays.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert arrays.labels.tolist() == [2, 3, 4, 5, 6, 7]
        assert arrays.offsets.tolist() == [0, 3, 4, 6]
        assert arrays.lines.tolist() == [7, 9, 12]
        assert arrays.metadata == {"read": 3}
        assert isinstance(arrays.input_ids.base, np.memmap)
    assert build.calls == 1
    assert os.listdir(tmp_path / "new") == ["key"]


def test_no_samples_at_all(tmp_path):
    arrays = open_or_build(tmp_path / "key", lambda writer: {"read": 0})
    assert (len(arrays.input_ids), arrays.offsets.tolist(), len(arrays.lines)) == (0, [0], 0)


@pytest.mark.parametrize("built_before", [False, True])
@pytest.mark.parametrize("name", ["input_ids", "labels", "offsets"])
def test_a_file_that_is_truncated_in_use_is_told_before_it_is_read(tmp_path, name, built_before):
    """Reading behind the end of a mapped file ends the process with SIGBUS."""
    if built_before:
        open_or_build(tmp_path / "key", Builder())
    arrays = open_or_build(tmp_path / "key", Builder())
    assert arrays.sample(2).input_ids.tolist() == [5, 6]
    os.truncate(tmp_path / "key" / f"{name}.bin", 4)
    with pytest.raises(DataError, match=rf"{name}\.bin: something has truncated this file .* to 4 bytes"):
        arrays.sample(2)


def test_files_that_are_removed_or_replaced_in_use_stay_readable(tmp_path):
    arrays = open_or_build(tmp_path / "key", Builder())
    for name in ("input_ids", "labels", "offsets"):
        (tmp_path / "key" / f"{name}.bin").unlink()
        (tmp_path / "key" / f"{name}.new").write_bytes(b"")
        (tmp_path / "key" / f"{name}.new").rename(tmp_path / "key" / f"{name}.bin")
    assert arrays.sample(2).input_ids.tolist() == [5, 6]


def truncate(folder):
    file = folder / "input_ids.bin"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder):
    file = folder / "labels.bin"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(bytes(data))


def wrong_version(folder):
    manifest = folder / MANIFEST
    stored = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**stored, "version": stored["version"] - 1}))


DAMAGES = {
    "truncated": truncate,
    "bit": flip_a_bit,
    "no-manifest": lambda folder: (folder / MANIFEST).unlink(),
    "half-manifest": lambda folder: (folder / MANIFEST).write_text('{"version": 1, "by'),
    "foreign-manifest": lambda folder: (folder / MANIFEST).write_text("[]"),
    "no-array": lambda folder: (folder / "lines.bin").unlink(),
    "version": wrong_version,
    "empty-folder": lambda folder: [file.unlink() for file in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_built_anew(tmp_path, damage):
    build = Builder()
    open_or_build(tmp_path / "key", build)
    damage(tmp_path / "key")
    assert open_or_build(tmp_path / "key", build).input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert build.calls == 2
    open_or_build(tmp_path / "key", build)
    assert build.calls == 2
    assert os.listdir(tmp_path) == ["key"]


def test_a_builder_that_fails_leaves_nothing_behind(tmp_path):
    def build(writer):
        writer.append([sample(1)], [1])
        raise DataError("bad records")

    with pytest.raises(DataError, match="bad records"):
        open_or_build(tmp_path / "key", build)
    assert os.listdir(tmp_path) == []


def test_builders_at_the_same_time_all_get_the_samples(tmp_path):
    together = threading.Barrier(4)
    results = []

    def build(writer):
        metadata = Builder()(writer)
        together.wait()  # all four finish writing before any of them renames
        return metadata

    def work():
        results.append(open_or_build(tmp_path / "key", build))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [arrays.input_ids.tolist() for arrays in results] == [[1, 2, 3, 4, 5, 6]] * 4
    assert os.listdir(tmp_path) == ["key"]


def test_folders_of_dead_builders_are_removed_of_living_ones_kept(tmp_path):
    dead, living = tmp_path / ".key.dead", tmp_path / ".key.living"
    for folder in (dead, living):
        folder.mkdir()
        (folder / "input_ids.bin").write_bytes(b"1234")
    long_ago = os.stat(dead).st_mtime - ABANDONED_AFTER_S - 60
    for path in (dead / "input_ids.bin", dead):
        os.utime(path, (long_ago, long_ago))
    open_or_build(tmp_path / "key", Builder())
    assert sorted(os.listdir(tmp_path)) == [".key.living", "key"]


def test_a_sibling_that_finishes_meanwhile_is_not_looked_at(tmp_path, monkeypatch):
    sibling = tmp_path / ".key.sibling"
    sibling.mkdir()
    (sibling / "input_ids.bin").write_bytes(b"1234")
    listed = Path.iterdir

    def renamed_before(path):
        if path == sibling and sibling.exists():
            sibling.rename(tmp_path / "other")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", renamed_before)
    assert len(open_or_build(tmp_path / "key", Builder()).lines) == 3
    assert sorted(os.listdir(tmp_path)) == ["key", "other"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the token cache .*file/key"):
        open_or_build(tmp_path / "file" / "key", Builder())

    def read_only(*args, **kwargs):  # permissions do not stop root, who runs many containers
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(DataError, match=r"Read-only file system\. Make that folder writable"):
        open_or_build(tmp_path / "key", Builder())


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path):
    def build(writer):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="No space left on device"):
        open_or_build(tmp_path / "key", build)
    assert os.listdir(tmp_path) == []


def test_an_existing_cache_in_a_read_only_folder_is_used(tmp_path, monkeypatch):
    open_or_build(tmp_path / "key", Builder())
    monkeypatch.setattr("tempfile.mkdtemp", lambda **kwargs: pytest.fail("must not write"))
    assert len(open_or_build(tmp_path / "key", Builder()).lines) == 3


def test_files_are_little_endian_whatever_the_machine():
    assert all(dtype.startswith("<") for dtype in ARRAYS.values())
