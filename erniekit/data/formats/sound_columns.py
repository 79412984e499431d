"""Read rows of tables that hold sound, as the `Audio` columns of `datasets` do: where the sound is, and none of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from erniekit.data.media.clip import Clip

BATCH_ROWS = 256
Row = dict[str, Any]


def sound_columns(schema: Any) -> list[str]:
    """Return the columns of an Arrow schema that are objects of `bytes` and `path`; images are such columns, too."""
    return [column.name for column in schema if _holds_bytes_and_path(column.type)]


def _holds_bytes_and_path(column: Any) -> bool:
    from pyarrow import types

    if not types.is_struct(column):
        return False
    fields = {field.name: field.type for field in column}
    held = fields.get("bytes")
    return held is not None and "path" in fields and (types.is_binary(held) or types.is_large_binary(held))


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Return the names of the classes that columns of integers stand for, such as languages: `datasets` writes them."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: feature["names"]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and isinstance(feature["names"], list)
        }
    except (LookupError, TypeError, ValueError, AttributeError):  # no such metadata
        return {}


def _named(row: Row, classes: dict[str, list[str]]) -> Row:
    """Return a row with the names of classes in the places of their numbers."""
    if not classes:
        return row
    names = {
        column: classes[column][number]
        for column, number in row.items()
        if column in classes and isinstance(number, int) and 0 <= number < len(classes[column])
    }
    return row | names


def parquet_rows(path: str | Path, file: Any) -> Iterator[Row]:
    """Yield the rows of a Parquet file.

    A column of sound has a clip where the row has bytes, else an object with `path`. The bytes are not read: the
    statistics of a row group say whether all of its rows have some. Only of a group where some have none, or without
    statistics, are they read, a few rows at a time.

    Args:
        file: a ParquetFile, opened.
    """
    sounds = sound_columns(file.schema_arrow)
    if not sounds:
        for batch in file.iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()
        return
    classes = _class_names(file.schema_arrow)
    columns = [f"{name}.path" if name in sounds else name for name in file.schema_arrow.names]
    place, before = os.path.realpath(path), 0
    for group in range(file.num_row_groups):
        held = {name: _rows_with_bytes(file, group, name) for name in sounds}
        rows = (
            row
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns)
            for row in batch.to_pylist()
        )
        for number, row in enumerate(rows):
            with_bytes = [name for name in sounds if held[name][number]]
            yield _named(row, classes) | {name: Clip(place, row=before + number, column=name) for name in with_bytes}
        before += file.metadata.row_group(group).num_rows


def _rows_with_bytes(file: Any, group: int, name: str) -> Sequence[bool]:
    """Return for each row of a row group whether a column of sound has bytes there."""
    metadata, leaf = file.metadata.row_group(group), f"{name}.bytes"
    chunks = (metadata.column(number) for number in range(metadata.num_columns))
    statistics = next(chunk.statistics for chunk in chunks if chunk.path_in_schema == leaf)
    nulls = statistics.null_count if statistics is not None and statistics.has_null_count else None
    if nulls in (0, metadata.num_rows):
        return [nulls == 0] * metadata.num_rows
    batches = file.iter_batches(8, row_groups=[group], columns=[leaf])
    return [held for batch in batches for held in batch.column(0).field("bytes").is_valid().to_pylist()]


def hub_rows(dataset: Any) -> Iterator[Row]:
    """Yield the rows of a data set, as `parquet_rows`; clips are in the Arrow files of its cache."""
    import pyarrow.compute as pc

    table = dataset.data.table
    sounds = sound_columns(table.schema)
    if not sounds:
        yield from dataset
        return
    classes = _class_names(table.schema)
    held = {}
    for name in sounds:
        column, index = table.column(name), table.schema.get_field_index(name)
        held[name] = pc.is_valid(pc.struct_field(column, "bytes"))
        table = table.set_column(index, name, pc.struct_field(column, "path"))
    places = _places([file["filename"] for file in dataset.cache_files])
    number = 0
    for batch in table.to_batches(BATCH_ROWS):
        for row, (path, place) in zip(batch.to_pylist(), places, strict=False):
            sound = {
                name: Clip(path, row=place, column=name) if held[name][number].as_py() else {"path": row[name]}
                for name in sounds
            }
            yield _named(row, classes) | sound
            number += 1


def _places(paths: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the file of each row of a data set, and the row's number in it."""
    from pyarrow import ipc, memory_map

    for path in paths:
        with memory_map(path) as mapped, ipc.open_stream(mapped) as stream:
            rows = sum(batch.num_rows for batch in stream)
        yield from ((path, row) for row in range(rows))
