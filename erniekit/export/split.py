"""Write the weights of a model folder in shards of another size. Needs no Paddle."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from erniekit.errors import ConfigurationError
from erniekit.export.publish import check_model_folder, check_target, publish
from erniekit.manifest import MANIFEST
from erniekit.model.storage.model_folder import PUBLISHING, read_shard_index
from erniekit.model.storage.shards import INDEX_FILE, SHARD_FILES, WEIGHTS_FILE, open_weight_files, write_weight_files
from erniekit.progress import progress

logger = logging.getLogger(__name__)

SPLIT_FOLDER = "split_export"  # in the folder that is split, as in the original
# The weights, which are written again, and files that belong to a run and not to its model.
NOT_COPIED = (
    WEIGHTS_FILE, INDEX_FILE, SHARD_FILES, MANIFEST, PUBLISHING,
    "checkpoint-*", ".erniekit.lock", ".writing-*", ".deleting-*", "export", SPLIT_FOLDER,
)  # fmt: skip


def split_model(source: Path, target: Path, max_shard_bytes: int, *, overwrite: bool = False) -> None:
    """Write a copy of the model folder `source` with at most `max_shard_bytes` in each weight file.

    Tensors of any type are copied byte for byte, a few MB at a time; so are all other files of the folder. A tensor
    larger than the limit gets a shard for itself.

    Raises:
        ConfigurationError: `source` is not a folder, or `target` is not empty or contains or lies inside `source`.
        ModelFileError: the weights are missing or damaged.
        CheckpointError: the disk is full or cannot be written.
    """
    check_model_folder(source)
    check_target(target, [source], overwrite=overwrite)
    if source.resolve() in target.resolve().parents and target.resolve() != (source / SPLIT_FOLDER).resolve():
        raise ConfigurationError(
            f"--output {target}: lies inside {source}, whose files are copied; name a folder outside it"
        )
    files = open_weight_files(source)
    tensors = {name: file.stored(name) for name, file in files.items()}
    metadata: dict[str, str] = {}
    for file in dict.fromkeys(files.values()):
        metadata = {**file.metadata, **metadata}
    written: list[Path] = []

    def write(folder: Path) -> None:
        items = progress(files.items(), "writing shards", len(files), "tensors")
        contents = ((name, file.blocks(name)) for name, file in items)
        written.extend(
            write_weight_files(folder, tensors, contents, max_shard_bytes, metadata, _index_metadata(source))
        )
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)

    publish(target, write)
    shards = [path for path in written if path.name != INDEX_FILE]
    total = sum(tensor.nbytes for tensor in tensors.values())
    logger.info(
        f"{target}: {len(tensors):,} tensors, {total / 1e9:,.3g} GB, "
        + (f"{len(shards)} shards and an index" if len(shards) > 1 else "one file")
    )


def _index_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the shard index of `folder` except the size; empty if there is no index."""
    if not (folder / INDEX_FILE).is_file():
        return {}
    return read_shard_index(folder / INDEX_FILE)[1]
