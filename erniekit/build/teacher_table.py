"""Build the tables of a teacher's likeliest tokens: where they lie, what they are made from, and who writes them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.data import DataParallelRank
from erniekit.build.model import read_model_config
from erniekit.build.precision import forward_precision
from erniekit.build.step_count import cache_folder
from erniekit.build.teacher import open_teacher
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.dataset import Dataset
from erniekit.data.packing import pack_sequential
from erniekit.distributed.mesh import Mesh
from erniekit.errors import ConfigurationError
from erniekit.hub.cache import chosen_hub
from erniekit.hub.download import find_model_folder
from erniekit.model.decoder import Decoder
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.progress import progress
from erniekit.training.collectives import Ranks
from erniekit.training.objectives.distillation import Teacher
from erniekit.training.objectives.teacher_top_k import (
    VERSION,
    TopKTable,
    arrays_folder,
    check_complete,
    finish,
    measure_top_k,
    top_k_teacher,
    write_part,
)

logger = logging.getLogger(__name__)

WEIGHT_FILES = (".safetensors", ".pdparams", ".bin")
BLOCK, BLOCKS = 4096, 64  # bytes of a file of weights that enter its fingerprint, and how often
Datasets = Mapping[str, tuple[Dataset, DataParallelRank]]  # by the name of the folder


def table_teachers(
    config: Config, datasets: Datasets, tp: TensorParallel, ranks: Ranks, mesh: Mesh
) -> dict[str, Teacher]:
    """Return the teachers that read tables, by the names of the datasets; missing tables are written first.

    The teacher is opened only where a table is missing, and forgotten before training.

    Args:
        tp: the ranks that divide the student's vocabulary.

    Raises:
        ConfigurationError: a folder holds the table of another teacher, of other data or of another k; or the samples
            have recordings.
    """
    teacher: Decoder | None = None
    found = {}
    weights = ranks.all_gather_object(_weights_fingerprint(_teacher_folder(config)))[0]
    rows = read_model_config(config).vocab_size
    for name, (dataset, dp_rank) in datasets.items():
        if dataset.audio is not None:
            raise ConfigurationError(
                "teacher_top_k: the samples of a model that listens have recordings, whose states a table does not "
                "hold\n  Write `teacher_top_k: 0`: the teacher then hears them itself."
            )
        wanted = _fingerprint(config, dataset, weights, rows)
        folder = _folder(config, wanted) / name
        complete = ranks.all_gather_object(check_complete(folder, wanted, "teacher_top_k_dir"))
        if not all(complete):
            teacher = teacher or open_teacher(config, mesh)
            _write(config, folder, wanted, dataset, dp_rank, teacher, ranks, mesh)
        size = sum(path.stat().st_size for path in folder.rglob("*.npy")) / 2**20
        logger.info(
            f"teacher: its {config.distillation.teacher_top_k} likeliest tokens ({name}), {size:,.1f} MiB in {folder}"
        )
        found[name] = top_k_teacher(TopKTable(folder), tp)
    return found


def _write(
    config: Config,
    folder: Path,
    wanted: Mapping[str, Any],
    dataset: Dataset,
    dp_rank: DataParallelRank,
    teacher: Decoder,
    ranks: Ranks,
    mesh: Mesh,
) -> None:
    started, parts, k = time.monotonic(), dp_rank.dp_world_size, config.distillation.teacher_top_k
    run = ranks.all_gather_object(uuid.uuid4().hex[:12])[0]
    own = list(range(dp_rank.dp_rank, len(dataset), parts))
    packs = _packs(dataset, own, config.training.max_seq_len)
    most = max(ranks.all_gather_object(len(packs)))  # ranks that share experts compute equally many batches
    rounds = [*packs, *[packs[-1] if packs else []] * (most - len(packs))]
    batches = progress(_batches(dataset, rounds, dp_rank.multiple_of), "teacher", unit="batches")
    measured = measure_top_k(teacher, batches, k, columns=wanted["rows"], dense_mask=config.uses_dense_mask)
    if mesh.is_first("tensor"):
        write_part(arrays_folder(folder, run), dataset, islice(measured, len(packs)), dp_rank.dp_rank, parts, k)
    for _ in measured:  # what other ranks need, or those that write
        pass
    ranks.all_gather_object(True)  # all parts are there
    if ranks.is_main_process:
        finish(folder, wanted, parts, run)
    ranks.all_gather_object(True)
    logger.info(f"teacher: {len(dataset):,} samples asked in {time.monotonic() - started:.1f} s")


def _packs(dataset: Dataset, samples: Sequence[int], max_seq_len: int) -> list[list[int]]:
    """Return the samples in their order, as rows of at most `max_seq_len` tokens."""
    if not samples:
        return []
    packs = pack_sequential(dataset.lengths[list(samples)], max_seq_len)
    return [[samples[number] for number in packs[place]] for place in range(len(packs))]


def _batches(dataset: Dataset, packs: Sequence[Sequence[int]], multiple_of: int) -> Iterator[Batch]:
    for pack in packs:
        batch = collate([[dataset.sample(index) for index in pack]], [pack], dataset.pad_id)
        rows, length = batch.shape
        yield batch.padded(rows, length + -length % multiple_of)


def _teacher_folder(config: Config) -> Path:
    name = config.distillation.teacher_model_name_or_path
    return find_model_folder(name, chosen_hub(config), weights=True, parameter="teacher_model_name_or_path")


def _folder(config: Config, wanted: Mapping[str, Any]) -> Path:
    """Return `teacher_top_k_dir`, else a folder of the cache whose name says what it is made from."""
    if config.distillation.teacher_top_k_dir:
        return Path(config.distillation.teacher_top_k_dir).expanduser()
    digest = hashlib.blake2b(json.dumps(wanted, sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_folder(config) / "teacher" / digest


def _fingerprint(config: Config, dataset: Dataset, weights: str, rows: int) -> dict[str, Any]:
    """Return everything that a table depends on.

    Args:
        weights: a fingerprint of the teacher.
        rows: of logits of the student, beyond which the teacher's are padding.
    """
    return {
        "version": VERSION,
        "teacher": weights,
        "data": dataset.fingerprint,
        "samples": len(dataset),
        "k": config.distillation.teacher_top_k,
        "rows": rows,
        "precision": forward_precision(config),
    }


def _weights_fingerprint(folder: Path) -> str:
    """Return a hash of a model's configuration, and of the sizes and 64 blocks of each of its files of weights."""
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for path in sorted(each for each in folder.iterdir() if each.suffix in WEIGHT_FILES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for place in np.linspace(0, max(0, size - BLOCK), BLOCKS).astype(np.int64).tolist():
                file.seek(place)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()
