"""Detect model folders that are half-written or sharded checkpoints, and read shard indices. Needs no Paddle or NumPy.

Publishing a model into a folder that is in use takes several operations. Meanwhile the folder has the marker and no
manifest; the manifest is written last. Model folders from elsewhere have neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError
from erniekit.json_files import read_json_object
from erniekit.manifest import MANIFEST

PUBLISHING = ".erniekit-publishing"
RANKS_FILE = "ranks.json"  # of a sharded checkpoint, of which every rank has written its shard
LONGEST_FILE_NAME = 255  # bytes
CONFIG_KEY = "quantization_config"  # of config.json, where weights are stored in few bits
PROGRAM_DESCRIPTION = "inference_config.json"  # of an exported program, which has no config.json
_CONFIGURATIONS = ("config.json", "adapter_config.json")


def is_program_folder(folder: Path) -> bool:
    """Return whether `folder` was written by `erniekit export --format inference` or `onnx`."""
    return (folder / PROGRAM_DESCRIPTION).is_file()


def is_half_written(folder: Path | str) -> bool:
    """Return whether publishing a model into `folder` was interrupted, so that its files may be half old, half new."""
    return (Path(folder) / PUBLISHING).exists() and not (Path(folder) / MANIFEST).exists()


def refuse_half_written(folder: Path | str) -> None:
    """Raise ModelFileError if publishing a model into `folder` was interrupted."""
    if is_half_written(folder):
        raise ModelFileError(
            f"{folder} contains a half-written model: the run that was saving it was killed, or is still saving it.\n"
            "  Let that run finish, or start it again with resume_from_checkpoint: true; or use one of its checkpoints."
            f"\n  If you have put a complete model there yourself since, remove {Path(folder) / PUBLISHING}."
        )


def refuse_sharded_checkpoint(folder: Path | str) -> None:
    """Raise ModelFileError for a sharded checkpoint, whose weights each rank has written separately."""
    folder = Path(folder)
    if (folder / RANKS_FILE).is_file() and not any((folder / name).is_file() for name in _CONFIGURATIONS):
        raise ModelFileError(
            f"{folder} is a sharded checkpoint: it contains the shards of each rank, and no full model "
            "(unified_checkpoint: false).\n  Resume that run from it: its final model, in output_dir, is full; with "
            "unified_checkpoint: true so is every further checkpoint."
        )


def read_shard_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the map from tensor names to files of a shard index, and its metadata.

    Raises:
        ModelFileError: the index cannot be read, or names something else than files in the same folder.
    """
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path}: not an index of shards: no `weight_map` from tensors to files")
    outside = sorted({str(name) for name in weight_map.values() if not _is_plain_name(name)})
    if outside:
        shown = ", ".join(repr(name[:80]) for name in outside[:5])
        raise ModelFileError(f"{path}: shards cannot be opened: not a plain file name: {shown}")
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _is_plain_name(name: object) -> bool:
    if not isinstance(name, str) or not name.isprintable():
        return False
    return Path(name).name == name and len(name.encode()) <= LONGEST_FILE_NAME
