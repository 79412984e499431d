"""Checkpoints of which every rank writes a part of its own (`unified_checkpoint: false`, `ignore_merge_optimizer`).

checkpoint-{step}/
  ranks.json        the layout of the run that wrote it, and what of it the ranks have written
  rank-00000/       what the first rank has: weights*.safetensors, optimizer*.safetensors, beside_model*.safetensors
  rank-00001/       ...

Each rank hashes and syncs its own part, and lists it in a manifest there. Nothing is gathered, so saving costs least;
the price is that only the layout that wrote the files can read them. All ranks write into one folder, which must lie on
a disk that they share.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.errors import CheckpointError, ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.storage.model_folder import RANKS_FILE
from erniekit.training.checkpoint.manifest import seal
from erniekit.training.collectives import Ranks

FORMAT = 1
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_PROBE = ".erniekit-shared-"


def _not_sharded(folder: Path) -> None:
    raise AssertionError("no rank writes a part of its own")


@dataclass(frozen=True)
class CheckpointShards:
    """What every rank writes of its own.

    Attributes:
        kinds: of WEIGHTS and OPTIMIZER; with WEIGHTS also what the objective keeps beside the model.
        write_model: puts what this rank has of the model into a folder; ranks exchange nothing in it.
        load_model: the opposite.
        optimizer_files: files of each rank's optimizer state.
    """

    kinds: frozenset[str] = frozenset()
    write_model: Callable[[Path], None] = _not_sharded
    load_model: Callable[[Path], None] = _not_sharded
    optimizer_files: int = 1


NO_SHARDS = CheckpointShards()


def shard_folder(folder: Path, rank: int) -> Path:
    """Where a rank's files are in a checkpoint."""
    return folder / f"rank-{rank:05}"


def sharded_kinds(folder: Path) -> frozenset[str]:
    """What ranks have written of their own: WEIGHTS, OPTIMIZER, both, or nothing.

    Raises:
        CheckpointError: `ranks.json` is damaged, or of a version that is not known.
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
    """Have every rank write its part of a checkpoint; called by all of them.

    Args:
        folder: where the first rank has its files; None on the others, which are told.
        kinds: what they write.
        write: puts this rank's files into a folder; it exchanges nothing, since a rank may fail before it.
        seals: whether every rank hashes and syncs its part, as the first one says; otherwise whoever completes the
            folder does.

    Raises:
        OSError, CheckpointError: a rank could not write; the former on the first rank, the latter on the others.
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
    """Whether the run that wrote its parts into `folder` was divided as this one is."""
    return bool(_read(folder)["layout"] == dict(ranks.layout))


def check_same_layout(folder: Path, ranks: Ranks) -> None:
    """Raise CheckpointError where the run that wrote its parts into `folder` was divided in another way than this."""
    if has_same_layout(folder, ranks):
        return
    stored, weights = _read(folder)["layout"], WEIGHTS in sharded_kinds(folder)
    what = "weights and optimizer states" if weights else "optimizer states"
    remedy = "unified_checkpoint: true" if weights else "no ignore_merge_optimizer in unified_checkpoint_config"
    fresh = "" if weights else "\n  Or go on with fresh moments here: ignore_load_lr_and_optim: true."
    raise CheckpointError(
        f"cannot resume from {folder}: every rank wrote {what} of its own, on another layout.\n"
        f"  written on: {describe_layout(stored)}\n"
        f"  this run:   {describe_layout(ranks.layout)}\n"
        f"  Resume on the layout that wrote it; with {remedy} its next checkpoint can be resumed from on any.{fresh}"
    )


def local_shard_of(folder: Path, ranks: Ranks) -> Path:
    """This rank's part of a checkpoint.

    Raises:
        CheckpointError: it is not to be seen from here.
    """
    shard = shard_folder(folder, ranks.rank)
    if not shard.is_dir():
        raise CheckpointError(
            f"rank {ranks.rank} on {socket.gethostname()} does not find {shard}.\n"
            "  A checkpoint whose parts were written by ranks must lie on a disk that all of them see."
        )
    return shard


def check_shared_filesystem(output_dir: Path, ranks: Ranks) -> None:
    """Raise CheckpointError where not all ranks see the first one's `output_dir`; called by all of them."""
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
            f"every rank writes its own part of a checkpoint, and rank {', '.join(blind[:8])} does not see the "
            f"{output_dir} of the first rank.\n  Choose an output_dir on a disk that all nodes share, or write "
            "unified_checkpoint: true without ignore_merge_optimizer: then the first rank writes for all."
        )


def describe_layout(layout: Mapping[str, Any]) -> str:
    """A layout in a user's words."""
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
        raise CheckpointError(f"{path}: parts of ranks in format {stored.get('format')}; this version reads {FORMAT}")
    return stored
