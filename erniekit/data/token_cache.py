"""Tokenised samples of one file on disk: raw little-endian arrays, memory-mapped, and a manifest with checksums.

A folder is written under a temporary name and renamed when complete, so it is complete or absent. Processes that build
the same folder at the same time write one each; the first to rename wins and the others use its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from erniekit.data.media.clip import Clip, PlacedClip
from erniekit.data.templates.ernie import PairOffsets, Sample
from erniekit.errors import DataError

FORMAT_VERSION = 4  # of the files and the metadata
MANIFEST = "manifest.json"
ARRAYS = {
    "input_ids": "<i4", "labels": "<i4", "offsets": "<i8", "lines": "<i4",
    "chosen": "<i4", "rejected": "<i4", "score_differences": "<f4",
}  # fmt: skip
# Of data with recordings: for each sample its clips, as JSON text, and where that begins. Others have no such files.
CLIP_ARRAYS = {"clips": "u1", "clip_offsets": "<i8"}
# Of data with packs: where in each sample further documents begin, and where these numbers do.
DOCUMENT_ARRAYS = {"documents": "<i4", "document_offsets": "<i8"}
# Of data that is interleaved in each epoch: the words of each record, three numbers each, and where these begin.
WORD_ARRAYS = {"words": "<i4", "word_offsets": "<i8"}
# Of recordings as codes: the numbers of each (`drawing.SpokenFacts`), and the codes of those that lie in no shard.
SPOKEN_ARRAYS = {"spoken": "<i4", "spoken_offsets": "<i8"}
CODE_ARRAYS = {"codes": "<u2", "code_offsets": "<i8"}
_OPTIONAL = {
    "clips": CLIP_ARRAYS, "documents": DOCUMENT_ARRAYS, "words": WORD_ARRAYS, "spoken": SPOKEN_ARRAYS,
    "codes": CODE_ARRAYS,
}  # fmt: skip
_OPTIONAL_ARRAYS = {name: dtype for arrays in _OPTIONAL.values() for name, dtype in arrays.items()}
ABANDONED_AFTER_S = 3600.0  # a temporary folder unchanged for so long belongs to a dead process
Metadata = dict[str, Any]
_CHECK_BLOCK = 1 << 24
_RENAME_ATTEMPTS = 5
_CLIP_BLOCK = 1000  # samples
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that this process has mapped into its memory, and its size then. Looking at it takes a microsecond."""

    path: Path
    inode: int
    size: int

    @classmethod
    def of(cls, path: Path) -> MappedFile:
        try:
            found = path.stat()
        except FileNotFoundError:  # removed meanwhile; what is mapped stays readable
            return cls(path, 0, 0)
        return cls(path, found.st_ino, found.st_size)

    def refuse_truncated(self) -> None:
        """Raise DataError if the file has become shorter. One that was removed or replaced stays readable as it was."""
        try:
            now = os.stat(self.path)
        except OSError:
            return
        if now.st_ino == self.inode and now.st_size < self.size:
            raise DataError(
                f"{self.path}: something has truncated this file of the token cache from {self.size:,} to "
                f"{now.st_size:,} bytes while it was in use. Start again: the cache is then built anew"
            )


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Concatenated samples, read from disk on demand.

    Attributes:
        input_ids, labels: int32[tokens], memory-mapped.
        offsets: int64[samples + 1]; sample i is [offsets[i], offsets[i + 1]).
        lines: int32[samples], the line of the file on which the record of a sample begins.
        metadata: JSON values that the builder recorded about the file.
        chosen, rejected, score_differences: the PairOffsets of every pair; empty for documents.
        clips, clip_offsets: uint8[bytes] and int64[samples + 1]; the JSON text of the clips of sample i is
            [clip_offsets[i], clip_offsets[i + 1]). Empty for data without recordings.
        documents, document_offsets: int32[documents] and int64[samples + 1]; where further documents of sample i begin
            is [document_offsets[i], document_offsets[i + 1]). Empty for data without packs.
        words, word_offsets: int32[numbers] and int64[samples + 1]; the words of sample i (`Sample.words`) are the
            numbers [word_offsets[i], word_offsets[i + 1]). Empty for data that is the same in each epoch.
        spoken, spoken_offsets: int32[12 n] and int64[n + 1], of recordings as codes; see `drawing.SpokenFacts`.
        codes, code_offsets: uint16[codes] and int64[samples + 1]; the codes of sample i, level after level, are
            [code_offsets[i], code_offsets[i + 1]). Empty where they lie in shards.
        files: the mapped files, for a look at whether they are whole; empty for arrays that are in memory.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    offsets: np.ndarray
    lines: np.ndarray
    metadata: Metadata
    chosen: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    rejected: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    score_differences: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    clips: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    clip_offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    documents: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    document_offsets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    words: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    word_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    spoken: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    spoken_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    codes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint16))
    code_offsets: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    files: tuple[MappedFile, ...] = ()

    def sample(self, index: int) -> Sample:
        """Return the tokens and labels of a sample: views of the mapped files, not copies.

        Raises:
            DataError: a file was truncated, and the system would end a process that reads behind its end.
        """
        for file in self.files:
            file.refuse_truncated()
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        pair = None
        if len(self.chosen):
            pair = PairOffsets(int(self.chosen[index]), int(self.rejected[index]), float(self.score_differences[index]))
        return Sample(
            self.input_ids[start:end],
            self.labels[start:end],
            pair,
            clips=self.sample_clips(index),
            documents=self._sample_documents(index),
        )

    def sample_clips(self, index: int) -> tuple[PlacedClip, ...]:
        """Return the clips of a sample."""
        if not len(self.clip_offsets):
            return ()
        text = self.clips[int(self.clip_offsets[index]) : int(self.clip_offsets[index + 1])].tobytes()
        return tuple(_read_clip(values) for values in json.loads(text)) if text else ()

    def _sample_documents(self, index: int) -> tuple[int, ...]:
        if not len(self.document_offsets):
            return ()
        return tuple(self.documents[int(self.document_offsets[index]) : int(self.document_offsets[index + 1])].tolist())

    def has_shared_prompts_beyond(self, length: int) -> bool:
        """Return whether a pair of more positions than `length` has its prompt only once."""
        once = np.diff(self.document_offsets) == 0 if len(self.document_offsets) else True
        return bool(len(self.chosen) and ((np.diff(self.offsets) > length) & once).any())

    def clip_paths(self) -> Iterator[str]:
        """Yield the path of every clip, in order; it takes about a microsecond."""
        ends = self.clip_offsets[::_CLIP_BLOCK].tolist()
        ends += [len(self.clips)] if len(self.clip_offsets) else []
        read = json.JSONDecoder().raw_decode
        for start, end in pairwise(ends):
            text, position = self.clips[start:end].tobytes().decode(), 0
            while position < len(text):
                values, position = read(text, position)
                yield from (value[0] for value in values)


class TokenWriter:
    """Append samples to the arrays of a folder, keeping none in memory. The folder may get further files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, BinaryIO] = {name: open(folder / f"{name}.bin", "wb") for name in ARRAYS}  # noqa: SIM115
        self._checksums = dict.fromkeys(ARRAYS, 0)
        self._end = 0
        self._samples = 0
        self._ends = dict.fromkeys(_OPTIONAL, 0)
        self._write("offsets", [0])

    def append(self, samples: Sequence[Sample], lines: Sequence[int]) -> None:
        if not samples:
            return
        ends = np.cumsum([len(sample.input_ids) for sample in samples]) + self._end
        self._end = int(ends[-1])
        self._write("input_ids", np.concatenate([sample.input_ids for sample in samples]))
        self._write("labels", np.concatenate([sample.labels for sample in samples]))
        self._write("offsets", ends)
        self._write("lines", lines)
        pair_offsets = [sample.pair for sample in samples if sample.pair is not None]
        if pair_offsets:
            for name, values in zip(
                ("chosen", "rejected", "score_differences"), zip(*pair_offsets, strict=True), strict=True
            ):
                self._write(name, values)
        self._append_optional("clips", [np.frombuffer(_clips_text(sample.clips), np.uint8) for sample in samples])
        self._append_optional("documents", [np.array(sample.documents, np.int32) for sample in samples])
        self._append_optional("words", [_NONE if sample.words is None else sample.words.ravel() for sample in samples])
        self._append_optional("spoken", [_NONE if sample.spoken is None else sample.spoken for sample in samples])
        self._append_optional("codes", [_NONE if sample.codes is None else sample.codes.ravel() for sample in samples])
        self._samples += len(samples)

    def _append_optional(self, kind: str, values: Sequence[np.ndarray]) -> None:
        """Append values that few data have; with the first ones, say of all samples before that they have none."""
        if kind not in self._files and not any(map(len, values)):
            return
        array, offsets = _OPTIONAL[kind]
        if kind not in self._files:
            for name in (array, offsets):
                self._files[name] = open(self.folder / f"{name}.bin", "wb")  # noqa: SIM115
                self._checksums[name] = 0
            self._write(offsets, np.zeros(self._samples + 1))
        ends = np.cumsum([len(each) for each in values]) + self._ends[kind]
        self._ends[kind] = int(ends[-1])
        self._write(array, np.concatenate(values))
        self._write(offsets, ends)

    def finish(self, metadata: Metadata) -> None:
        """Sync the arrays, then write the manifest that makes the folder valid."""
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        self.close()
        manifest = {"version": FORMAT_VERSION, "facts": metadata, "bytes": sizes, "crc32": self._checksums}
        with open(self.folder / MANIFEST, "w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=1)
            text.flush()
            os.fsync(text.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        data = np.asarray(values).astype((ARRAYS | _OPTIONAL_ARRAYS)[name]).tobytes()
        self._checksums[name] = zlib.crc32(data, self._checksums[name])
        self._files[name].write(data)


def _clips_text(clips: Sequence[PlacedClip]) -> bytes:
    """Return the clips of a sample as JSON text; nothing where there are none."""
    values = [[*astuple(each.clip), each.place, each.tokens, each.length] for each in clips]
    return json.dumps(values, separators=(",", ":")).encode() if values else b""


def _read_clip(values: list[Any]) -> PlacedClip:
    return PlacedClip(Clip(*values[:-3]), *values[-3:])


def _always_current(arrays: TokenArrays) -> bool:
    del arrays
    return True


def open_or_build(
    folder: Path,
    build: Callable[[TokenWriter], Metadata],
    is_current: Callable[[TokenArrays], bool] = _always_current,
) -> TokenArrays:
    """Open the arrays of `folder`; if it is absent, incomplete, damaged or out of date, let `build` fill it first.

    Args:
        folder: the final path, named by everything that its contents depend on.
        build: appends all samples to the given writer and returns the metadata to store.
        is_current: whether a folder still says what its sources do; for what its name does not depend on.

    Raises:
        DataError: the folder cannot be written. Also whatever `build` raises; then no files are left behind.
    """
    arrays = _open_valid(folder)
    if arrays is not None and is_current(arrays):
        return arrays
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        if arrays is not None:
            _remove(folder)
        temp_dir = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        writer = TokenWriter(temp_dir)
        try:
            writer.finish(build(writer))
        finally:
            writer.close()
        arrays = _open_valid(temp_dir)  # before the rename: mapped files stay valid even if they are renamed or deleted
        if arrays is None:
            raise DataError(f"{temp_dir}: the token cache does not read back as it was written; is the disk sound?")
        _rename_into_place(temp_dir, folder)
        arrays = replace(arrays, files=_mapped_files(folder))
    except OSError as error:
        raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
    return arrays


def open_arrays(folder: Path) -> TokenArrays | None:
    """Open the arrays of a folder that a TokenWriter finished; None if it is absent, incomplete or damaged."""
    return _open_valid(folder)


def _rename_into_place(temp_dir: Path, folder: Path) -> None:
    """Rename `temp_dir` to `folder`; remove a damaged folder there, keep a valid one of another process."""
    for _ in range(_RENAME_ATTEMPTS):
        try:
            os.rename(temp_dir, folder)
            return
        except OSError:
            if _open_valid(folder) is not None:
                return
            _remove(folder)
    os.rename(temp_dir, folder)


def _remove(folder: Path) -> None:
    """Remove a folder in one step, so that no process finds a part of it."""
    removed = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):  # another process was removing it too
        os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _open_valid(folder: Path) -> TokenArrays | None:
    """Return the arrays, or None unless every file has the size and checksum that the manifest records."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != FORMAT_VERSION:
            return None
        arrays = {}
        kinds = [dtypes for kind, dtypes in _OPTIONAL.items() if kind in manifest["bytes"]]
        for name, dtype in [*ARRAYS.items(), *(item for dtypes in kinds for item in dtypes.items())]:
            path = folder / f"{name}.bin"
            if path.stat().st_size != manifest["bytes"][name] or _checksum(path) != manifest["crc32"][name]:
                return None
            arrays[name] = _memory_map(path, dtype) if manifest["bytes"][name] else np.empty(0, dtype)
        return TokenArrays(**arrays, metadata=dict(manifest["facts"]), files=_mapped_files(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # rebuild it, whatever is wrong


def _mapped_files(folder: Path) -> tuple[MappedFile, ...]:
    optional = tuple(name for name in _OPTIONAL_ARRAYS if (folder / f"{name}.bin").exists())
    return tuple(MappedFile.of(folder / f"{name}.bin") for name in ("input_ids", "labels", "offsets", *optional))


def _memory_map(path: Path, dtype: str) -> np.ndarray:
    # As a plain array: slicing np.memmap costs microseconds more, and there is a slice for every sample.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_CHECK_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _remove_abandoned(folder: Path) -> None:
    for temp_dir in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(FileNotFoundError):  # its builder has just renamed or removed it
            touched = max(entry.stat().st_mtime for entry in (temp_dir, *temp_dir.iterdir()))
            if time.time() - touched > ABANDONED_AFTER_S:
                shutil.rmtree(temp_dir, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write the token cache {folder}: {error.strerror or error}. "
        "Make that folder writable, free some space, or choose another cache folder"
    )
