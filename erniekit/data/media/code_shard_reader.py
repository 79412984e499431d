"""Read shards of codes (`code_shards.py`), also those that others have written.

These are not trusted: no pickled object is loaded, no size of a header is believed before it has been compared with the
file, and everything that is wrong is told with its file and member.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from erniekit.data.media.code_shards import INDEX, SUFFIX, CodedRecording, CodePlace, Shard

SECONDS_TOLERANCE = 0.01  # for each recording, by which sums of rounded durations may differ
_BLOCK = 512  # of tar files
_HEADER_ERRORS = (
    ValueError, EOFError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError, TokenError,
)  # fmt: skip


class ShardProblem(NamedTuple):
    """What is wrong with a file of a shard, or with a member or line of one ("" for the file).

    Attributes:
        line: of the record that is concerned in the shard's JSONL file, from 1; 0: it is no single record.
    """

    path: Path
    member: str
    expected: str
    got: str
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.path}: {self.member}" if self.member else str(self.path)
        return f"{place}: expected {self.expected}, got {self.got}"


Found = CodedRecording | ShardProblem


def read_index(path: Path) -> Iterator[Shard | ShardProblem]:
    """Yield the shards of `data.lst`, and a problem for each line that names none.

    Files that are not where a line says are looked for below the folder of the index, which may have been moved.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        yield ShardProblem(path, "", "an index of shards", _reason(error))
        return
    seen: set[Path] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _shard_of(path, f"line {number}", line.split())
        if isinstance(found, Shard) and found.tar in seen:
            found = ShardProblem(path, f"line {number}", "each shard once", f"{found.tar} again")
        if isinstance(found, Shard):
            seen.add(found.tar)
        yield found
    if not any(line.strip() for line in lines):
        yield ShardProblem(path, "", "at least one shard", "an empty file")


def read_shard(shard: Shard, *, levels: int | None = None, codebook_size: int | None = None) -> Iterator[Found]:
    """Yield the recordings of a shard in the order of the tar file, and everything that is wrong with it.

    The records of one shard are in memory, and the codes of one recording.

    Args:
        levels: of the codes; None: those of the first recording.
        codebook_size: a code is less than this; None: it is not known.
    """
    records: dict[str, tuple[int, dict[str, Any]]] = {}
    for item in _read_records(shard.records):
        if isinstance(item, ShardProblem):
            yield item
            continue
        line, record = item
        if record["id"] in records:
            first = records[record["id"]][0]
            yield ShardProblem(
                shard.records, f"line {line}", "each id once", f"{record['id']!r}, as line {first}", line
            )
        else:
            records[record["id"]] = line, record
    count, seconds, seen = 0, 0.0, set[str]()
    for member in _read_members(shard.tar):
        if isinstance(member, ShardProblem):
            yield member
            continue
        key, content, offset = member
        count += 1
        name = key + SUFFIX
        if key in seen:
            yield ShardProblem(shard.tar, name, "each key once", "it again")
            continue
        seen.add(key)
        codes = _codes_of(content, levels, codebook_size)
        if isinstance(codes, tuple):
            yield ShardProblem(shard.tar, name, *codes, line=records[key][0] if key in records else 0)
            continue
        levels = len(codes)
        if key not in records:
            yield ShardProblem(shard.tar, name, f"a record with this id in {shard.records}", "none")
            continue
        line, record = records[key]
        if record.get("num_tokens", codes.shape[1]) != codes.shape[1]:
            got = f"{record['num_tokens']!r}, and {codes.shape[1]:,} frames in {shard.tar}"
            yield ShardProblem(shard.records, f"line {line}: num_tokens", "the frames of the codes", got, line)
            continue
        seconds += _duration(record)
        yield CodedRecording(key, codes, record, line, _place_of(codes, offset + len(content) - codes.nbytes))
    for key, (line, _) in records.items():
        if key not in seen:
            expected = f"{key}{SUFFIX} in {shard.tar}"
            yield ShardProblem(shard.records, f"line {line}", expected, "no such member", line)
    if shard.count is not None and shard.count != count:
        yield ShardProblem(shard.tar, "", f"{shard.count:,} recordings, as the index says", f"{count:,}")
    elif shard.seconds is not None and seconds and abs(shard.seconds - seconds) > SECONDS_TOLERANCE * max(count, 1):
        yield ShardProblem(
            shard.records, "", f"{shard.seconds:.3f} seconds of sound, as the index says", f"{seconds:.3f}"
        )


def read_shards(source: Path, *, levels: int | None = None, codebook_size: int | None = None) -> Iterator[Found]:
    """Yield what `read_shard` finds in all shards of a folder, of an index, or in one tar file.

    A key that two shards have is a problem.
    """
    seen: dict[str, Path] = {}
    for shard in shards_of(source):
        if isinstance(shard, ShardProblem):
            yield shard
            continue
        for item in read_shard(shard, levels=levels, codebook_size=codebook_size):
            if isinstance(item, CodedRecording):
                levels = len(item.codes)
                if item.key in seen:
                    name = item.key + SUFFIX
                    yield ShardProblem(shard.tar, name, "a key that no other shard has", f"that of {seen[item.key]}")
                    continue
                seen[item.key] = shard.tar
            yield item


def shards_of(source: Path) -> Iterator[Shard | ShardProblem]:
    """Yield the shards of a folder with an index, of an index, or a tar file with the JSONL file beside it.

    The folder may hold parts that several machines wrote, each with an index.
    """
    if source.is_dir():
        indices = [source / INDEX] if (source / INDEX).is_file() else sorted(source.glob(f"part-*/{INDEX}"))
        if not indices:
            yield ShardProblem(source, "", f"a folder with {INDEX}", "none")
        for index in indices:
            yield from read_index(index)
    elif source.suffix == ".tar":
        beside = source.with_suffix(".jsonl")
        yield Shard(source, beside if beside.is_file() else source.parent.parent / "txts" / beside.name)
    else:
        yield from read_index(source)


def _shard_of(path: Path, place: str, columns: list[str]) -> Shard | ShardProblem:
    if len(columns) != 4:
        return ShardProblem(path, place, "TAR JSONL COUNT SECONDS", f"{len(columns)} columns")
    try:
        count, seconds = int(columns[2]), float(columns[3])
        if count < 0 or not 0 <= seconds < float("inf"):
            raise ValueError
    except ValueError:
        return ShardProblem(path, place, "a count and seconds from 0", " ".join(columns[2:])[:60])
    files = []
    for name in columns[:2]:
        places = (Path(name), path.parent / name, path.parent / Path(name).parent.name / Path(name).name)
        file = next((file for file in places if file.is_file()), None)
        if file is None:
            return ShardProblem(path, place, "files that exist", f"no {name}, neither there nor below {path.parent}")
        files.append(file)
    return Shard(files[0], files[1], count, seconds)


def _read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]] | ShardProblem]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _record_of(path, number, line)
    except OSError as error:
        yield ShardProblem(path, "", "the records of a shard", _reason(error))


def _record_of(path: Path, number: int, line: bytes) -> tuple[int, dict[str, Any]] | ShardProblem:
    place = f"line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ShardProblem(path, place, "a JSON object", f"{_reason(error)} (is the file cut short?)", number)
    if not isinstance(record, dict):
        return ShardProblem(path, place, "a JSON object", type(record).__name__, number)
    if not isinstance(record.get("id"), str):
        return ShardProblem(path, f"{place}: id", "a text", repr(record.get("id"))[:60], number)
    return number, record


def _read_members(path: Path) -> Iterator[tuple[str, bytes, int] | ShardProblem]:
    """Yield the key, the content and the content's offset of each member of a tar file."""
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            size = os.fstat(file.fileno()).st_size
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # the list would grow with the file
                if member.isdir():
                    continue
                if member.size < 0:  # `tarfile` would go back and read the same members for ever
                    yield ShardProblem(path, member.name[:100], "a size from 0", f"{member.size:,}: a damaged header")
                    return
                if member.offset_data + member.size > size:
                    held = max(0, size - member.offset_data)
                    got = f"{held:,}: the file is cut short"
                    yield ShardProblem(path, member.name[:100], f"{member.size:,} bytes", got)
                    return
                if problem := _member_problem(member):
                    yield ShardProblem(path, member.name[:100], *problem)
                    continue
                content = tar.extractfile(member)
                assert content is not None  # it is a file
                yield member.name.removesuffix(SUFFIX), content.read(), member.offset_data
            if problem := _end_problem(file, tar.offset, size):
                yield ShardProblem(path, "", *problem)
    except (OSError, tarfile.TarError, EOFError) as error:
        yield ShardProblem(path, "", "a whole tar file", f"{_reason(error)} (is it cut short?)")


def _member_problem(member: tarfile.TarInfo) -> tuple[str, str] | None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or "\0" in member.name:
        return "a name inside the shard", "a path that leaves it"
    if not member.isreg() or member.issparse():
        return "a file", "a file with holes" if member.issparse() else "a link, device or pipe"
    if not member.name.endswith(SUFFIX) or "." in name.name[: -len(SUFFIX)] or name.name == SUFFIX:
        return "KEY.npy, without a dot in the key", "another name"
    return None


def _end_problem(file: BinaryIO, offset: int, size: int) -> tuple[str, str] | None:
    """Return what is wrong where reading a tar file has ended; `tarfile` takes a damaged header for the end."""
    file.seek(offset)
    block = file.read(_BLOCK)
    if len(block) == _BLOCK and not any(block):
        return None
    what = "a damaged header" if len(block) == _BLOCK else "nothing: the file is cut short"
    return "the end of the tar file", f"{what} at byte {min(offset, size):,}"


def _codes_of(content: bytes, levels: int | None, codebook_size: int | None) -> np.ndarray | tuple[str, str]:
    """Return int[levels, frames] of the content of an npy file, or what was expected of it and what it is."""
    file = io.BytesIO(content)
    try:
        major, _ = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, kind = read(file)
    except _HEADER_ERRORS as error:
        return "an array in NumPy's format", _reason(error)
    if kind.hasobject or kind.kind not in "iu":
        return "integers", "Python objects, which are not loaded" if kind.hasobject else str(kind)[:60]
    if len(shape) != 2 or min(shape) < 1:
        return "an array [levels, frames]", f"one of shape {list(shape)}"
    size, held = shape[0] * shape[1] * kind.itemsize, len(content) - file.tell()
    if held != size:
        return f"{size:,} bytes of {list(shape)} codes", f"{held:,}"
    if levels is not None and shape[0] != levels:
        return f"codes of {levels} levels", str(shape[0])
    codes = np.frombuffer(content, kind, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    least, most = int(codes.min()), int(codes.max())
    if least < 0 or (codebook_size is not None and most >= codebook_size):
        wrong = least if least < 0 else most
        level, frame = np.argwhere(codes == wrong)[0]
        limit = f" and below {codebook_size:,}" if codebook_size is not None else ""
        return f"codes from 0{limit}", f"{wrong} (level {level}, frame {frame})"
    return codes


def _place_of(codes: np.ndarray, offset: int) -> CodePlace | None:
    if codes.dtype.byteorder == ">" or (codes.dtype.byteorder == "=" and sys.byteorder == "big"):
        return None
    size = codes.dtype.itemsize
    return CodePlace(0, offset, size if codes.flags.c_contiguous else -size, *codes.shape)


def _duration(record: Mapping[str, Any]) -> float:
    """Return the seconds that a record says; 0 if it says none, or what cannot be the length of a recording."""
    value = record.get("audio_duration")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value <= sys.float_info.max else 0.0


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:200]
