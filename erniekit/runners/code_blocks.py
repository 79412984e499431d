"""Encode the records of a list in blocks, each of which is complete or absent.

A block has `samples_per_shard` records, in an order that depends on the data and the seed alone. It is one shard, or a
stretch of `units.jsonl`; once it is complete a note of it is left in the folder `.encoding`. So a command that was
interrupted, however, continues behind the last complete block.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.codecs.codec import Codec
from erniekit.codecs.workers import Encoded, Failed, Reading, Result, encode_clips
from erniekit.config import Config
from erniekit.config.sections.codes import part_of
from erniekit.data.media.code_shards import (
    INDEX,
    CodedRecording,
    json_line,
    shard_key,
    write_index,
    write_shard,
    write_whole,
)
from erniekit.data.media.codes_folder import ERRORS, SKIPPED, UNITS, CodesFacts, shard_files, write_facts
from erniekit.data.record_list import ListedRecord, RecordList
from erniekit.data.recording_facts import duration
from erniekit.environment import usable_cores
from erniekit.runners.codes_progress import CodesProgress

logger = logging.getLogger(__name__)

WORK = ".encoding"  # the list of records and the notes of complete blocks, until everything is written


@dataclass
class Block:
    """What became of the records of a block.

    Attributes:
        count, seconds: of the recordings that were encoded.
        errors, skipped: lines of `errors.jsonl` and `skipped.jsonl`.
    """

    count: int
    seconds: float
    errors: list[dict[str, Any]]
    skipped: list[dict[str, Any]]


class CodesSummary(NamedTuple):
    """What a command has left: recordings that are encoded, and those that cannot be."""

    recordings: int
    errors: int


def reading_of(config: Config) -> Reading:
    """Return how recordings are read."""
    shortest, longest = config.codes.duration_range
    return Reading(shortest, longest, config.codes.audio_peak)


def encode_blocks(
    folder: Path, facts: CodesFacts, records: RecordList, opener: Callable[[], Codec], config: Config
) -> CodesSummary:
    """Encode the records of a list that no complete block has, and finish the folder.

    Args:
        opener: opens the codec, in another process, too.
    """
    order, section = _order(records, config), config.codes
    size = section.samples_per_shard
    if section.codes_format == "shards":
        size = _shard_size(len(order), size, section.min_num_shards)
        _tell_changed_ids(records, order)
    starts = range(0, len(order), size)
    notes = [folder / WORK / f"block-{number:06d}.json" for number in range(len(starts))]
    done = [_read_note(note) for note in notes]
    first = next((number for number, block in enumerate(done) if block is None), len(done))
    blocks = [block for block in done[:first] if block is not None]
    if blocks:
        logger.info(f"continuing: {len(blocks):,} of {len(starts):,} blocks are complete")
    workers = _workers(config, len(order))
    logger.info(
        f"encoding: {facts.levels} level{'s' * (facts.levels > 1)} of {facts.codebook_size:,} codes, "
        f"{facts.frame_rate:g} frames a second, "
        f"{workers} process{'es' * (workers > 1)}"
    )
    write = _write_shard if section.codes_format == "shards" else _write_units
    left = (records[int(number)] for number in order[first * size :])
    with (
        closing(_results(left, opener, reading_of(config), workers)) as encoded,
        CodesProgress("encoding", len(order) - first * size) as progress,
    ):
        for number in range(first, len(starts)):
            items = islice(encoded, min(size, len(order) - starts[number]))
            block = Block(0, 0.0, [], [])
            write(folder, number, _coded(items, block, facts, progress), facts)
            write_whole(notes[number], json.dumps(block.__dict__).encode())
            blocks.append(block)
            if section.codes_format == "shards" and block.count:
                _write_index(folder, blocks)
        told = progress.told()
    return _finish(folder, facts, records, blocks, config, told)


def remove_notes(folder: Path) -> None:
    """Forget that blocks are complete; the list of records stays, because it tells itself whether it is current."""
    for pattern in ("block-*", "units-*"):
        for path in (folder / WORK).glob(pattern):
            path.unlink()


def _shard_size(recordings: int, size: int, shards: int) -> int:
    """Return the largest size up to `size` with which there are at least so many shards."""
    return size if shards == 1 else max(1, min(size, -(-recordings // (shards - 1)) - 1))


def _order(records: RecordList, config: Config) -> np.ndarray:
    """Return the numbers of the records of this part, in the order in which they are written."""
    count = len(records)
    shuffled = config.training.random_shuffle
    order = np.random.default_rng(config.training.seed).permutation(count) if shuffled else np.arange(count)
    part, parts = part_of(config.codes)
    return order[part - 1 :: parts]


def _workers(config: Config, recordings: int) -> int:
    """Return the number of processes: on a CPU one for each core, on a GPU one, unless the user says how many."""
    if config.codes.codes_workers:
        wanted = config.codes.codes_workers
    elif "paddle" in sys.modules and sys.modules["paddle"].device.get_device().startswith("gpu"):  # a neural codec
        wanted = 1
    else:
        wanted = usable_cores()
    return max(1, min(wanted, recordings))


def _results(
    records: Iterator[ListedRecord], opener: Callable[[], Codec], reading: Reading, workers: int
) -> Generator[tuple[ListedRecord, Result]]:
    """Yield each record with its result, a few records ahead of what is written."""
    waiting: list[ListedRecord] = []

    def clips() -> Iterator[Any]:
        for record in records:
            waiting.append(record)
            yield record.clip

    for result in encode_clips(clips(), opener, reading, workers):
        yield waiting.pop(0), result


def _coded(
    items: Iterator[tuple[ListedRecord, Result]], block: Block, facts: CodesFacts, progress: CodesProgress
) -> Iterator[tuple[ListedRecord, Encoded]]:
    """Yield what was encoded, and note the rest in the block."""
    for record, result in items:
        if isinstance(result, Encoded):
            _check_codes(record, result, facts)
            block.count, block.seconds = block.count + 1, block.seconds + result.seconds
            yield record, result
            progress.recording(result.seconds)
            continue
        place = {"id": record.id, "place": record.place}
        if isinstance(result, Failed):
            block.errors.append(place | {"reason": result.reason})
        else:
            block.skipped.append(place | {"seconds": round(result.seconds, 3)})
        progress.recording(0.0)


def _check_codes(record: ListedRecord, result: Encoded, facts: CodesFacts) -> None:
    """Refuse codes that a codec must not give; they would be read as something else."""
    codes = result.codes
    if codes.ndim != 2 or len(codes) != facts.levels or codes.min() < 0 or codes.max() >= facts.codebook_size:
        raise AssertionError(
            f"{record.place}: the codec gave codes of shape {codes.shape}, {codes.min()}..{codes.max()}"
        )


def _write_shard(folder: Path, number: int, items: Iterator[tuple[ListedRecord, Encoded]], facts: CodesFacts) -> None:
    files = shard_files(folder, number)
    for file in (files.tar, files.records):
        file.parent.mkdir(exist_ok=True)
    samples = (
        CodedRecording(key, result.codes, _with_codes_fields(record, key, result))
        for record, result in items
        for key in [shard_key(record.id)]
    )
    write_shard(files, samples, facts.codebook_size)


def _with_codes_fields(record: ListedRecord, key: str, result: Encoded) -> dict[str, Any]:
    frames = int(result.codes.shape[1])
    return record.fields | {"id": key, "num_tokens": frames, "audio_duration": round(result.seconds, 6)}


def _write_units(folder: Path, number: int, items: Iterator[tuple[ListedRecord, Encoded]], facts: CodesFacts) -> None:
    target = _units_file(folder, number)
    temp_path = target.with_suffix(".partial")
    with open(temp_path, "wb") as file:
        for record, result in items:
            lacking = {} if "duration" in record.fields else {"duration": round(result.seconds, 6)}
            units = {"units": result.codes[0].tolist(), "units_per_second": facts.frame_rate}
            file.write(json_line(record.fields | {"id": record.id} | lacking | units))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp_path, target)


def _units_file(folder: Path, number: int) -> Path:
    return folder / WORK / f"units-{number:06d}.jsonl"


def _read_note(path: Path) -> Block | None:
    try:
        return Block(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_index(folder: Path, blocks: list[Block]) -> None:
    shards = [
        replace(shard_files(folder, number), count=block.count, seconds=round(block.seconds, 3))
        for number, block in enumerate(blocks)
        if block.count
    ]
    write_index(folder / INDEX, shards)


def _tell_changed_ids(records: RecordList, order: np.ndarray) -> None:
    """Say so where ids are written in another way: readers of tar files end a key at its first dot."""
    changed = [record for record in islice((records[int(number)] for number in order), 1000) if _is_changed(record)]
    if changed:
        record = changed[0]
        logger.info(
            f"{record.place}: id {record.id!r} becomes {shard_key(record.id)!r}: in shards a dot, a slash, % and "
            "control characters of ids are written as %xx"
        )


def _is_changed(record: ListedRecord) -> bool:
    return shard_key(record.id) != record.id


def _finish(
    folder: Path, facts: CodesFacts, records: RecordList, blocks: list[Block], config: Config, told: str
) -> CodesSummary:
    """Write the files that speak of all blocks, say that the folder is complete, and remove the notes."""
    of_list = records.errors if part_of(config.codes)[0] == 1 else None  # one part tells of records without a recording
    errors = _write_lines(folder / ERRORS, of_list, (line for block in blocks for line in block.errors))
    skipped = _write_lines(folder / SKIPPED, None, (line for block in blocks for line in block.skipped))
    recordings, seconds = sum(block.count for block in blocks), sum(block.seconds for block in blocks)
    if recordings and config.codes.codes_format == "jsonl":  # readers take an empty file for a damaged one
        _join(folder, len(blocks))
    elif recordings:
        _write_index(folder, blocks)
    records.close()
    write_facts(
        folder,
        replace(facts, complete=True, recordings=recordings, seconds=round(seconds, 3), errors=errors, skipped=skipped),
    )
    shutil.rmtree(folder / WORK, ignore_errors=True)
    shards = sum(block.count > 0 for block in blocks)
    in_shards = f"{shards:,} shard{'s' * (shards != 1)} in {folder}"
    where = folder / UNITS if config.codes.codes_format == "jsonl" else in_shards
    logger.info(f"encoded {recordings:,} recordings, {duration(seconds)} of sound{told} -> {where}")
    if skipped:
        logger.info(f"{skipped:,} are shorter or longer than duration_range: {folder / SKIPPED}")
    if errors:
        with open(folder / ERRORS, encoding="utf-8") as file:
            first = json.loads(file.readline())
        said = f"{errors:,} recording{'s' * (errors > 1)} cannot be encoded: {folder / ERRORS}"
        logger.error(f"error: {said}; the first: {first['place']}: {first['reason']}")
    return CodesSummary(recordings, errors)


def _write_lines(path: Path, first: Path | None, lines: Iterator[dict[str, Any]]) -> int:
    """Write a file of JSON lines after those of another one; return their number. Without any there is no file."""
    temp_path, count = path.with_name(f".{path.name}.partial"), 0
    with open(temp_path, "wb") as file:
        if first is not None:
            with open(first, "rb") as source:
                for line in source:
                    file.write(line)
                    count += 1
        for record in lines:
            file.write(json_line(record))
            count += 1
    if count:
        os.replace(temp_path, path)
    else:
        temp_path.unlink()
        path.unlink(missing_ok=True)
    return count


def _join(folder: Path, blocks: int) -> None:
    """Join the stretches of `units.jsonl`."""
    temp_path = folder / f".{UNITS}.partial"
    with open(temp_path, "wb") as file:
        for number in range(blocks):
            with open(_units_file(folder, number), "rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp_path, folder / UNITS)
