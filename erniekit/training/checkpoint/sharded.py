"""Sharded checkpoints, in which every rank writes its shard (`unified_checkpoint: false`, `ignore_merge_optimizer`).

checkpoint-{step}/
  ranks.json        the layout of the run that wrote it, and the kinds of tensors that are sharded
  rank-00000/       the first rank's shard: weights*.safetensors, optimizer*.safetensors, beside_model*.safetensors
  rank-00001/       ...

Each rank hashes and syncs its shard, and writes a manifest for it. Nothing is gathered, so saving is as cheap as
possible; but only the layout that wrote the files can read them. All ranks write into one folder, which must be on a
disk that they share.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.errors import CheckpointError, ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.storage.model_folder import RANKS_FILE
from erniekit.training.checkpoint.manifest import seal

if TYPE_CHECKING:
    from erniekit.training.collectives import Ranks

FORMAT = 1
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_PROBE = ".erniekit-shared-"


def _not_sharded(folder: Path) -> None:
    raise AssertionError("the checkpoint is not sharded")


@dataclass(frozen=True)
class CheckpointShards:
    """The sharded part of a run's checkpoints.

    Attributes:
        kinds: of WEIGHTS and OPTIMIZER; WEIGHTS includes the objective's extra state.
        write_model: writes this rank's shard of the model into a folder, without collectives.
        load_model: reads it back.
        optimizer_files: number of files for each rank's optimizer state.
    """

    kinds: frozenset[str] = frozenset()
    write_model: Callable[[Path], None] = _not_sharded
    load_model: Callable[[Path], None] = _not_sharded
    optimizer_files: int = 1


NO_SHARDS = CheckpointShards()


def shard_folder(folder: Path, rank: int) -> Path:
    """Return the folder of a rank's files in a checkpoint."""
    return folder / f"rank-{rank:05}"


def sharded_kinds(folder: Path) -> frozenset[str]:
    """Return the kinds that are sharded in a checkpoint: WEIGHTS, OPTIMIZER, both, or none.

    Raises:
        CheckpointError: `ranks.json` is damaged, or of an unknown version.
    """
    return frozenset(_read(folder)["parts"]) if (folder / RANKS_FILE).exists() else frozenset()


def write_shards(
    folder: Path | None,
    ranks: Ranks,
    kinds: frozenset[str],
    write: Callable[[Path], None],
    *,
    seals: bool = True,
) -> None:
    """Write this rank's shard of a checkpoint; called by all ranks.

    Args:
        folder: the first rank's folder; None on the others, which receive it.
        kinds: the kinds of tensors that are sharded.
        write: writes this rank's files into a folder, without collectives, since another rank may have failed.
        seals: whether every rank hashes and syncs its shard, as the first rank decides; otherwise the process that
            completes the folder does.

    Raises:
        OSError, CheckpointError: a rank could not write; OSError on the first rank, CheckpointError on the others.
    """
    reported, seals = ranks.all_gather_object(["" if folder is None else str(folder.absolute()), seals])[0]
    folder_of_all = Path(reported)
    own, failed = shard_folder(folder_of_all, ranks.rank), ""
    try:
        own.mkdir()
        write(own)
        if seals:
            seal(own)
    except (OSError, CheckpointError) as error:
        failed = str(error)
    failures = [f"rank {rank}: {reported}" for rank, reported in enumerate(ranks.all_gather_object(failed)) if reported]
    if failures and folder is not None:
        raise OSError("; ".join(failures[:3]))
    if failures:
        raise CheckpointError(f"could not write {folder_of_all}: {'; '.join(failures[:3])}")
    if folder is not None:
        content = {"format": FORMAT, "layout": dict(ranks.layout), "parts": sorted(kinds)}
        (folder / RANKS_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def has_same_layout(folder: Path, ranks: Ranks) -> bool:
    """Return whether the run that wrote `folder` had the same layout."""
    return bool(_read(folder)["layout"] == dict(ranks.layout))


def check_same_layout(folder: Path, ranks: Ranks) -> None:
    """Raise CheckpointError if the run that wrote `folder` had another layout."""
    if has_same_layout(folder, ranks):
        return
    stored, weights = _read(folder)["layout"], WEIGHTS in sharded_kinds(folder)
    what = "weights and optimizer states" if weights else "optimizer states"
    remedy = "unified_checkpoint: true" if weights else "no ignore_merge_optimizer in unified_checkpoint_config"
    fresh = "" if weights else "\n  Or continue with fresh moments here: ignore_load_lr_and_optim: true."
    raise CheckpointError(
        f"cannot resume from {folder}: its {what} are sharded for another layout.\n"
        f"  written on: {describe_layout(stored)}\n"
        f"  this run:   {describe_layout(ranks.layout)}\n"
        f"  Resume on the layout that wrote it; with {remedy} its next checkpoint can be resumed on any layout.{fresh}"
    )


def local_shard_of(folder: Path, ranks: Ranks) -> Path:
    """Return the folder with this rank's shard of a checkpoint.

    Raises:
        CheckpointError: this rank does not see the folder.
    """
    shard = shard_folder(folder, ranks.rank)
    if not shard.is_dir():
        raise CheckpointError(
            f"rank {ranks.rank} on {socket.gethostname()} cannot find {shard}.\n"
            "  A sharded checkpoint must be on a disk that all ranks share."
        )
    return shard


def check_shared_filesystem(output_dir: Path, ranks: Ranks) -> None:
    """Raise CheckpointError if some rank does not see the first rank's `output_dir`; called by all ranks."""
    probe = output_dir / f"{_PROBE}{secrets.token_hex(8)}" if ranks.is_main_process else None
    if probe is not None:
        probe.touch()
    name = ranks.all_gather_object(probe.name if probe is not None else "")[0]
    unseen = ranks.all_gather_object("" if (output_dir / name).exists() else socket.gethostname())
    if probe is not None:
        probe.unlink()
    blind = [f"{rank} (on {host})" for rank, host in enumerate(unseen) if host]
    if blind:
        raise CheckpointError(
            f"every rank writes its shard of a checkpoint, and rank {', '.join(blind[:8])} does not see the "
            f"{output_dir} of the first rank.\n  Choose an output_dir on a disk that all nodes share, or write "
            "unified_checkpoint: true without ignore_merge_optimizer: then the first rank writes for all."
        )


def describe_layout(layout: Mapping[str, Any]) -> str:
    """Describe a layout for the user."""
    ranks = layout.get("ranks", 1)
    words = [f"{name} {value}" for name, value in layout.items() if name != "ranks" and value != ""]
    return f"{ranks} rank{'s' if ranks != 1 else ''}" + (f": {', '.join(words)}" if words else "")


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RANKS_FILE
    try:
        stored = read_json_object(path)
    except ModelFileError as error:
        raise CheckpointError(f"{error}; it is needed to resume") from None
    if stored.get("format") != FORMAT or not isinstance(stored.get("layout"), dict):
        raise CheckpointError(
            f"{path}: sharded checkpoint in format {stored.get('format')}; this version reads {FORMAT}"
        )
    return stored
