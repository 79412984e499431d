"""Shards of codes: tar files of arrays, JSON lines of their records beside them, and an index, `data.lst`.

A shard is a tar file with a member `KEY.npy` for each recording, int16[levels, frames] (int32 where a code needs it),
and a JSONL file with its record: `id`, which is the key, `num_tokens` (frames), `audio_duration` (seconds) and the
fields of the record itself. A line of the index is `TAR JSONL COUNT SECONDS`. So the `webdataset` package reads the
shards, and so do programs that train on them, such as OmniVoice's.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.errors import DataError

INDEX = "data.lst"
SUFFIX = ".npy"
_INT16_CODES = 1 << 15
LONGEST_KEY = 200  # bytes; a file's name has at most 255
_UNFIT = re.compile(r"[%./\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # tar readers end a key at its first dot


@dataclass(frozen=True, slots=True)
class Shard:
    """A line of an index.

    Attributes:
        tar, records: the files.
        count: the recordings in it; None: not known, because no index lists it.
        seconds: of sound, all recordings together.
    """

    tar: Path
    records: Path
    count: int | None = None
    seconds: float | None = None


class CodePlace(NamedTuple):
    """Where the codes of a recording lie in a file, to be read without the rest of it.

    Attributes:
        file: its number among the shards.
        offset: of the first code, in bytes.
        item_size: bytes of a code, a whole number from 0 with its lowest byte first; negative where the codes of a
            frame lie together instead of those of a level.
        levels, frames: the shape.
    """

    file: int
    offset: int
    item_size: int
    levels: int
    frames: int


@dataclass(frozen=True, slots=True)
class CodedRecording:
    """The codes of a recording, and its record.

    Attributes:
        key: unique in its shards.
        codes: int[levels, frames].
        record: its fields; a shard's have `id`, `num_tokens` and `audio_duration`.
        line: of its record in the JSONL file, from 1; 0: not read from a shard.
        place: of its codes in the tar file, whose number is 0; None: not read from one, or the highest byte is first.
    """

    key: str
    codes: np.ndarray
    record: dict[str, Any]
    line: int = 0
    place: CodePlace | None = None


def shard_key(name: str) -> str:
    """Return the key of a recording: its id, with `%xx` for characters that end keys or name folders.

    Different ids have different keys. One of 1 to LONGEST_KEY bytes is the name of a file, too.
    """
    return _UNFIT.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), name)


def write_shard(shard: Shard, samples: Iterable[CodedRecording], codebook_size: int) -> Shard:
    """Write the two files of a shard, each complete or absent, the tar file last.

    Equal samples give equal bytes. One of them is in memory at a time.

    Args:
        shard: with the paths of the files.
        codebook_size: a code is less than this; it decides the type of the arrays.

    Returns:
        The shard with its count and seconds; without any sample nothing is written.
    """
    count, seconds = 0, 0.0
    tar_path, records_path = _partial(shard.tar), _partial(shard.records)
    with open(tar_path, "wb") as tar_file, open(records_path, "wb") as records:
        with tarfile.open(fileobj=tar_file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for sample in samples:
                content = _npy(sample.codes, codebook_size)
                member = tarfile.TarInfo(sample.key + SUFFIX)
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
                records.write(json_line(sample.record))
                count, seconds = count + 1, seconds + float(sample.record["audio_duration"])
        for file in (tar_file, records):
            file.flush()
            os.fsync(file.fileno())
    for written, target in ((records_path, shard.records), (tar_path, shard.tar)):
        if count:
            os.replace(written, target)
        else:
            written.unlink()
            target.unlink(missing_ok=True)
    return Shard(shard.tar, shard.records, count, round(seconds, 3))


def write_index(path: Path, shards: Iterable[Shard]) -> None:
    """Write `data.lst` with absolute paths, complete or not at all.

    Raises:
        DataError: a path has a space, which separates the columns.
    """
    lines = []
    for shard in shards:
        files = [str(file.absolute()) for file in (shard.tar, shard.records)]
        for file in files:
            if any(character.isspace() for character in file):
                raise DataError(f"{path}: the index has spaces between its columns, and a path contains one: {file}")
        lines.append(f"{files[0]} {files[1]} {shard.count} {shard.seconds:.3f}\n")
    write_whole(path, "".join(lines).encode())


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file, complete or not at all."""
    temp_path = _partial(path)
    with open(temp_path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp_path, path)


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON; half of a surrogate pair, which UTF-8 lacks, stays escaped."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _npy(codes: np.ndarray, codebook_size: int) -> bytes:
    file = io.BytesIO()
    kind = np.int16 if codebook_size <= _INT16_CODES else np.int32
    np.lib.format.write_array(file, np.ascontiguousarray(codes, dtype=kind), allow_pickle=False)
    return file.getvalue()
