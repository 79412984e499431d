"""Read records of Parquet files and of data sets of the Hugging Face hub, row by row.

Parquet needs pyarrow, the hub the `datasets` library; each is imported on first use. Only data is read: `datasets` 4
runs no code of a data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.sound_columns import hub_rows, parquet_rows

PARQUET = ".parquet"
FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".txt", PARQUET)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+(/[\w.-]+)?)?")
_INSTALL = "pip install 'erniekit[data]'"


def is_hub_dataset(path: str | Path) -> bool:
    """Return whether a path that is not a file names a data set: org/name, org/name:split, org/name:config/split.

    A missing file is not taken for a data set: its folder exists, or its name ends like a data file's.
    """
    here = Path(path)
    try:
        if here.exists() or here.parent.exists() or here.suffix.lower() in FILE_SUFFIXES:
            return False
    except OSError:  # a name that no file system takes
        return False
    return _HUB_NAME.fullmatch(str(path)) is not None


def read_parquet_values(path: str | Path) -> Iterator[tuple[int, object] | RecordProblem]:
    """Yield (row from 1, record) of a file with a few rows in memory; columns without a value are left out."""
    name = str(path)
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        yield RecordProblem(name, 0, "file", f"pyarrow to read Parquet ({_INSTALL})", "no such package")
        return
    row = 0
    try:
        with ParquetFile(path) as file:
            for record in parquet_rows(path, file):
                row += 1
                yield row, _without_nulls(record)
    except (OSError, ArrowException) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        yield RecordProblem(name, row, "file", "a readable Parquet file", reason)
        return
    if not row:
        yield RecordProblem(name, 0, "file", "at least one record", "an empty file")


def read_hub_values(path: str | Path) -> Iterator[tuple[int, object] | RecordProblem]:
    """Yield (row from 1, record) of a data set, read from the Arrow files of its cache on demand."""
    table = _open(str(path))
    if isinstance(table, RecordProblem):
        yield table
        return
    if not len(table):
        yield RecordProblem(str(path), 0, "data set", "at least one record", "an empty one")
    for row, record in enumerate(hub_rows(table), start=1):
        yield row, _without_nulls(record)


def hub_files(path: str | Path) -> list[Path]:
    """Return the local files of a data set; [] if it cannot be opened (reading it reports why)."""
    table = _open(str(path))
    return [] if isinstance(table, RecordProblem) else [Path(file["filename"]) for file in table.cache_files]


def hub_cache_folders() -> list[str]:
    """Return those folders of caches that exist, below which lie the files that a data set names."""
    try:
        import datasets
        from huggingface_hub import constants
    except ImportError:  # reading the data set reports it
        return []
    folders = [str(constants.HF_HUB_CACHE), str(datasets.config.HF_DATASETS_CACHE)]
    return [folder for folder in folders if Path(folder).is_dir()]


def _open(name: str) -> Any:
    """Return the data set or a problem. If the hub cannot be reached, use what `hf download` left in its cache."""
    try:
        import datasets
        from huggingface_hub import snapshot_download
    except ImportError:
        return RecordProblem(name, 0, "data set", f"the datasets library ({_INSTALL})", "no such package")
    repository, _, chosen = name.partition(":")
    config, _, split = chosen.rpartition("/")
    options = {"name": config or None, "split": split or "train"}
    errors = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        return datasets.load_dataset(repository, **options)
    except errors as error:
        reason = str(error).splitlines()[0]
    try:
        return datasets.load_dataset(
            snapshot_download(repository, repo_type="dataset", local_files_only=True), **options
        )
    except errors:
        expected = (
            "a data set of the Hugging Face hub that can be reached, or is in its cache; without a network, run "
            f"`hf download {repository} --repo-type dataset` where there is one and copy the cache (HF_HOME) here"
        )
        return RecordProblem(name, 0, "data set", expected, reason)


def _without_nulls(value: Any) -> Any:
    """Drop nulls: columns have one where a record lacks the field, and so do objects in lists."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
