"""List the records whose recordings a command works on, in files in which each is found by its number.

So an order can be drawn and a command continued without all records in memory: a record costs 24 bytes of it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from erniekit.data.formats.asr import parse_clip
from erniekit.data.formats.files import parse_values
from erniekit.data.formats.media_paths import locate_clip, media_folders
from erniekit.data.formats.problems import Effect, MalformedError, ProblemList, RecordProblem, describe_value
from erniekit.data.formats.table import hub_cache_folders, hub_files, is_hub_dataset
from erniekit.data.media.clip import Clip
from erniekit.data.media.code_shards import LONGEST_KEY, json_line, shard_key, write_whole
from erniekit.errors import DataError
from erniekit.progress import progress

_RECORDS, _OFFSETS, _ERRORS, _FACTS = "records.jsonl", "offsets.npy", "errors.jsonl", "list.json"


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """A record and its recording.

    Attributes:
        id: of the record's field `id`, or made of its file and line; unique in the list.
        place: file:line.
        clip: the recording, with the path of a file that exists.
        fields: those of the record that JSON can hold.
    """

    id: str
    place: str
    clip: Clip
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ListFacts:
    """What is known of a list.

    Attributes:
        identity: of the files and settings that it was made from.
        count: the records.
        errors: the records that name no recording.
        left_out: fields that JSON cannot hold, such as the bytes of sounds.
    """

    identity: str
    count: int
    errors: int
    left_out: list[str]


def data_identity(paths: Sequence[str], media_dir: Sequence[str]) -> str:
    """Return a digest of the files of some data: their names, sizes and times; not of the recordings."""
    facts: list[object] = [list(media_dir)]
    for path in paths:
        files = hub_files(path) if is_hub_dataset(path) else [Path(path).expanduser()]
        for file in files:
            status = file.stat() if file.exists() else None
            facts.append([str(file), status and status.st_size, status and status.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


class RecordList:
    """Records by number, in the order of the data; read from the files that `write_list` left."""

    def __init__(self, folder: Path, facts: ListFacts) -> None:
        self.facts = facts
        self.errors = folder / _ERRORS  # a line for each record that names no recording: `id`, `place`, `reason`
        self._offsets = np.load(folder / _OFFSETS, mmap_mode="r", allow_pickle=False)
        self._file = open(folder / _RECORDS, "rb")  # noqa: SIM115

    def __len__(self) -> int:
        return self.facts.count

    def __getitem__(self, number: int) -> ListedRecord:
        self._file.seek(int(self._offsets[number]))
        return _parse(self._file.readline())

    def close(self) -> None:
        self._file.close()


def open_list(folder: Path, identity: str) -> RecordList | None:
    """Open the list of a folder; None if there is no complete one with this identity."""
    try:
        facts = ListFacts(**json.loads((folder / _FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return RecordList(folder, facts) if facts.identity == identity else None


def write_list(folder: Path, paths: Sequence[str], media_dir: Sequence[str]) -> RecordList:
    """List the records of data files.

    Args:
        folder: receives the files of the list; those that it has are replaced.

    Raises:
        DataError: a file cannot be read, or no record names a recording.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FACTS).unlink(missing_ok=True)
    identity = data_identity(paths, media_dir)
    problems, left_out = ProblemList(), dict[str, None]()
    offsets, hashes = array("Q"), array("Q")
    with open(folder / _RECORDS, "wb") as file, open(folder / _ERRORS, "wb") as errors:
        for item in progress(_read(paths, media_dir, left_out), "listing recordings"):
            if isinstance(item, RecordProblem):
                if item.line == 0 or item.effect is Effect.STOP:
                    ProblemList([item]).raise_if_any()
                    raise DataError(str(item))
                problems.add(item)
                errors.write(json_line({"id": "", "place": f"{item.path}:{item.line}", "reason": item.description}))
                continue
            offsets.append(file.tell())
            hashes.append(_hash(item.id))
            file.write(_line(item))
        file.flush()
        kept, drawn = np.array(offsets, np.uint64), np.array(hashes, np.uint64)
        again = _repeated(folder / _RECORDS, kept, drawn, errors)
    kept = np.delete(kept, again)
    if not len(kept):
        problems.raise_if_any()
        raise DataError(f"{', '.join(paths)}: no record names a recording")
    np.save(folder / _OFFSETS, kept)
    facts = ListFacts(identity, len(kept), problems.total + len(again), list(left_out))
    write_whole(folder / _FACTS, json_line(asdict(facts)))
    return RecordList(folder, facts)


def _read(
    paths: Sequence[str], media_dir: Sequence[str], left_out: dict[str, None]
) -> Iterator[ListedRecord | RecordProblem]:
    stems = [Path(path).stem for path in paths]
    for number, path in enumerate(paths):
        stem = stems[number] if stems.count(stems[number]) == 1 else f"{stems[number]}-{number + 1}"
        source = path if is_hub_dataset(path) else str(Path(path).expanduser())
        in_cache = is_hub_dataset(path) and not media_dir
        folders = media_folders(source, hub_cache_folders() if in_cache else media_dir)

        def parse(
            line: int, value: object, source: str = source, stem: str = stem, folders: Sequence[str] = folders
        ) -> ListedRecord:
            if not isinstance(value, dict):
                raise MalformedError("record", "a JSON object", describe_value(value))
            clip = locate_clip(parse_clip(value), value, folders)
            own, unfit = {}, (Clip, bytes)
            for name, held in value.items():
                if isinstance(held, unfit):
                    left_out[name] = None
                else:
                    own[name] = held
            return ListedRecord(_id_of(value, f"{stem}-{line}"), f"{source}:{line}", clip, own)

        yield from parse_values(source, parse)


def _id_of(record: dict, otherwise: str) -> str:
    value = record.get("id", otherwise)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise MalformedError("id", "a text or an integer", describe_value(value))
    size = len(shard_key(str(value)).encode())
    if not 1 <= size <= LONGEST_KEY:
        raise MalformedError("id", f"1 to {LONGEST_KEY} bytes", f"{size:,}")
    return str(value)


def _repeated(path: Path, offsets: np.ndarray, hashes: np.ndarray, errors: BinaryIO) -> list[int]:
    """Return the numbers of records whose id an earlier one has, and add an error for each."""
    distinct, counts = np.unique(hashes, return_counts=True)
    suspicious = np.flatnonzero(np.isin(hashes, distinct[counts > 1]))
    first: dict[str, str] = {}
    again = []
    with open(path, "rb") as file:
        for number in suspicious.tolist():
            file.seek(int(offsets[number]))
            record = _parse(file.readline())
            if record.id in first:
                again.append(number)
                reason = f"id: expected one that no other record has, got that of {first[record.id]}"
                errors.write(json_line({"id": record.id, "place": record.place, "reason": reason}))
            else:
                first[record.id] = record.place
    return again


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _line(record: ListedRecord) -> bytes:
    clip = record.clip
    where = [clip.path, clip.start, clip.end, clip.row, clip.column]
    return json.dumps([record.id, record.place, where, record.fields], default=_plain).encode() + b"\n"


def _parse(line: bytes) -> ListedRecord:
    name, place, clip, own = json.loads(line)
    return ListedRecord(name, place, Clip(*clip), own)


def _plain(value: object) -> object:
    """Return what JSON holds of a value of a table, such as a date; null for bytes within one."""
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return None if isinstance(value, (bytes, Clip)) else str(value)
