"""Which folder of the token cache holds the samples of a source, and whether it still says what its files do."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from erniekit.data.alignment_facts import ALIGNMENTS, alignments_unchanged
from erniekit.data.code_reader import shards_unchanged
from erniekit.data.conversation import Source
from erniekit.data.formats.files import file_problem
from erniekit.data.formats.media_paths import media_folders
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.formats.speech_codes import is_shards, shards_at
from erniekit.data.formats.table import hub_files, is_hub_dataset
from erniekit.data.recording_facts import glimpse, recordings_unchanged
from erniekit.data.token_cache import FORMAT_VERSION, TokenArrays
from erniekit.data.tokenize import TokenizationSettings
from erniekit.data.units import ALIGNED_UNITS, CODES

# Increase when the same records of a kind give other samples: then runs are not resumed and caches not used.
SAMPLES_VERSIONS = {"messages": 4, "alpaca": 2, "messages preferences": 2, "alpaca preferences": 2}  # 1 for all others


def unreadable(source: Source) -> RecordProblem | None:
    """Return why the path of a source cannot be read; None if it can be, or if reading tells what is wrong with it."""
    if is_hub_dataset(source.path) or (_is_of_shards(source) and source.path.exists()):
        return None
    return file_problem(source.path)


def cache_key(source: Source, settings: TokenizationSettings) -> str:
    """Return a digest that identifies the source's samples, independent of its path.

    Files are read whole, except the tar files of shards: of these it is the size and a stretch in the middle.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in _content_files(source):
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    for shard in shards_at(source.path) if _is_of_shards(source) else ():
        facts = shard.count, os.stat(shard.tar).st_size, glimpse(str(shard.tar))
        digest.update(repr(facts).encode())
    split = () if source.split is None else (source.split,)
    version = SAMPLES_VERSIONS.get(source.kind, 1)
    digest.update(repr((version, source.kind, *settings.key(source.kind), *split)).encode())
    return digest.hexdigest()


def cache_name(key: str, source: Source, settings: TokenizationSettings) -> str:
    """Return the name of a source's folder in the cache.

    Whatever the policy, the sound records give the same samples; but a folder must not hide from "stop" what "skip"
    left out.
    """
    return f"{key}-{FORMAT_VERSION}{_place(source, settings)}{'-skip' if settings.skips_bad_records else ''}"


def is_current(settings: TokenizationSettings, folder: Path, arrays: TokenArrays) -> bool:
    """Return whether recordings, alignments and shards are as they were. Those of skipped records are not known: look
    again."""
    reads_files = settings.audio or ALIGNMENTS in arrays.metadata
    if reads_files and settings.skips_bad_records and arrays.metadata.get("skipped"):
        return False
    if not shards_unchanged(arrays.metadata):
        return False
    return recordings_unchanged(arrays) and alignments_unchanged(folder, arrays.metadata)


def _is_of_shards(source: Source) -> bool:
    return source.kind == CODES and is_shards(source.path)


def _content_files(source: Source) -> list[Path]:
    """Return the files that are read whole to tell whether a source has changed."""
    if is_hub_dataset(source.path):
        return hub_files(source.path)
    if _is_of_shards(source):
        return [shard.records for shard in shards_at(source.path)]
    return [source.path]


def _place(source: Source, settings: TokenizationSettings) -> str:
    """Return what the name of a cache folder says of where recordings and shards lie, which are stored by their paths;
    "" where there are none. Not of the samples: a run may go on with the same data in another place."""
    if _is_of_shards(source):
        tars = [str(shard.tar) for shard in shards_at(source.path)]
        return "-" + hashlib.blake2b(repr(tars).encode(), digest_size=4).hexdigest()
    if settings.audio is None and source.kind != ALIGNED_UNITS:  # whose words may lie in other files
        return ""
    in_cache = is_hub_dataset(source.path) and not source.media_dir  # of the hub's client
    folders = () if in_cache else media_folders(source.path, source.media_dir)
    return "-" + hashlib.blake2b(repr(folders).encode(), digest_size=4).hexdigest()
