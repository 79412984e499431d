"""Build the reference model of preference losses."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle

from erniekit.build.adapters import adapter_plan, initial_adapters, parent_adapters
from erniekit.build.checks import reference_config
from erniekit.build.distributed import model_shard_arguments
from erniekit.build.model import (
    head_settings,
    initial_weights,
    open_model,
    read_model_config,
)
from erniekit.build.precision import apply_mixed_precision, forward_precision
from erniekit.build.quantization import quantization_from
from erniekit.build.step_count import cache_folder
from erniekit.config import Config
from erniekit.config.sections.dpo import compares_with_reference
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.hub.cache import chosen_hub
from erniekit.hub.download import find_model_folder
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.lora.config import PISSA
from erniekit.model.lora.fingerprint import weights_fingerprint
from erniekit.model.lora.lora import named_adapter_weights
from erniekit.model.weights import named_weights
from erniekit.progress import progress
from erniekit.training.checkpoint.tensors import TensorFiles
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.preference import answer_log_probabilities, reference_logps_function
from erniekit.training.objectives.reference import (
    AdapterReference,
    ComputeLogps,
    FrozenReference,
    PrecomputedReference,
    Reference,
    clone_tensors,
    has_missing_logps,
    precompute_missing_logps,
)

logger = logging.getLogger(__name__)

# Tables of log-probabilities on disk: one array for a set of pairs and a reference model.

TABLE_VERSION = 1  # raise it when the same pairs and weights give other log-probabilities


def table_path(
    cache: Path, dataset: Dataset, model: Decoder, ranks: Ranks = SINGLE_PROCESS, precision: str = ""
) -> Path:
    """Return the file of a table, the same on every rank.

    Its name is a hash of everything that the values depend on: pairs, weights, FP8 settings, adapters and the
    precision of the forward pass ("": float32).
    """
    digest = hashlib.blake2b(digest_size=16)
    base = weights_fingerprint(model, ranks.all_gather_object)
    digest.update(repr((TABLE_VERSION, dataset.fingerprint, len(dataset), base)).encode())
    if model.activation_scales is not None:
        digest.update(repr(model.activation_scales.settings).encode())
    for name, weight in named_adapter_weights(model).items():
        digest.update(name.encode())
        digest.update(weight.numpy().tobytes())
    digest.update(precision.encode())
    digests = dict.fromkeys(
        ranks.all_gather_object(digest.hexdigest())
    )  # one digest, unless ranks have different shards of the model
    name = (
        "".join(digests)
        if len(digests) == 1
        else hashlib.blake2b(repr(list(digests)).encode(), digest_size=16).hexdigest()
    )
    return cache / "reference" / f"{name}.npy"


def read_table(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read a table, fp32 of `shape`; all NaN if the file is missing or damaged."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        table = np.empty(0)
    return table if table.shape == shape and table.dtype == np.float32 else np.full(shape, np.nan, np.float32)


def write_table(path: Path, table: np.ndarray) -> None:
    """Replace the file atomically; log a warning if the disk cannot be written."""
    temp_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp_path, "wb") as file:
            np.save(file, table, allow_pickle=False)
        os.replace(temp_path, path)
    except OSError as error:
        temp_path.unlink(missing_ok=True)
        logger.warning(f"{path} cannot be written ({error.strerror}): the next run computes its reference again")


@dataclass(frozen=True)
class PairBatches:
    """The pairs that a run reads; `batches` yields every batch that this rank reads in the run."""

    dataset: Dataset
    batches: Callable[[], Iterable[Batch]]


def evaluation_reference(config: Config, model: Decoder, ranks: Ranks, mesh: Mesh) -> Reference | None:
    """Build the reference of an evaluation without training.

    It is `ref_model_name_or_path`. Without it adapters are compared with the adapters that their run started from, or
    with their base model; a full model has no reference, and its rewards are beta x log-probability.
    """
    if not compares_with_reference(config.dpo):
        return None
    measure = log_prob_fn(config, ranks)
    if config.dpo.ref_model_name_or_path:
        copy = open_reference_model(config, mesh)
        return FrozenReference(copy, model, measure, updated=False, ranks=ranks)
    if not config.lora.lora:
        logger.info("reference: none; write ref_model_name_or_path to compare with the model before training")
        return None
    model_config = read_model_config(config)
    adapters = adapter_plan(config, model_config)
    started_from = parent_adapters(adapters.folder) if adapters and adapters.folder else None
    # PiSSA has moved a part of the base into its adapters, so the base alone is not complete
    if started_from is None and not (adapters and adapters.settings.init == PISSA):
        logger.info("reference: the same model with its adapters disabled")
        return AdapterReference(model, measure, ranks=ranks)
    logger.info(f"reference: {started_from or 'the base of the adapters'}, a frozen copy")
    copy = build_model(
        model_config,
        initial_weights(config),
        seed=config.training.seed,
        adapters=started_from,
        quantization=quantization_from(config),
        **model_shard_arguments(config, model_config, mesh),
    )
    apply_mixed_precision(config, copy, logging.DEBUG)
    return FrozenReference(copy, model, measure, updated=False, ranks=ranks)


def open_reference_model(config: Config, mesh: Mesh = SINGLE_PROCESS_MESH) -> Decoder:
    """Open the model of `ref_model_name_or_path`, or else the model that a fresh run would start from.

    It is sharded like the trained model.

    Raises:
        ModelFileError: the folder is not valid.
    """
    name = config.dpo.ref_model_name_or_path
    if not name:
        adapters = adapter_plan(config, read_model_config(config))
        # its lines would repeat those of the trained model
        return open_model(config, initial_weights(config), adapters=adapters, mesh=mesh, log_level=logging.DEBUG)
    folder = find_model_folder(name, chosen_hub(config), weights=True, parameter="ref_model_name_or_path")
    other = reference_config(config, read_model_config(config))
    assert other is not None, "it has been fetched"
    logger.info(f"reference: {folder}")
    model = build_model(other, folder, **model_shard_arguments(config, other, mesh))
    apply_mixed_precision(config, model, logging.DEBUG)  # differences of log-probabilities are of one precision
    return model


def log_prob_fn(config: Config, ranks: Ranks = SINGLE_PROCESS) -> ComputeLogps:
    """Return the function that computes the log-probabilities of answers as the objective does."""
    return reference_logps_function(answer_log_probabilities(**head_settings(config)), ranks)


def disabled_adapters_reference(
    config: Config,
    model: Decoder,
    saved: TensorFiles,
    ranks: Ranks,
    *,
    fresh: bool,
    measure: ComputeLogps | None = None,
) -> AdapterReference:
    """Build the reference that is the trained model with its adapters disabled.

    If the adapters had an effect before the first step (they came from a folder, or PiSSA moved a part of the weights
    into them), the reference has the adapters that the run started from instead.

    Args:
        measure: computes the log-probabilities; None: those of pairs.
    """
    own = [name for name in named_adapter_weights(model) if name in saved.names]
    adapters = {name: paddle.to_tensor(saved.read(name)) for name in own}
    if fresh and (initial_adapters(config) is not None or config.lora.lora_init == PISSA):
        trained = named_adapter_weights(model)
        with ranks.gather_params(trained.values()):
            adapters = clone_tensors(trained)
    what = "the adapters that the run started from" if adapters else "its adapters disabled"
    logger.info(f"reference: the same model with {what}")
    return AdapterReference(model, measure or log_prob_fn(config, ranks), adapters or None, ranks)


def frozen_copy_reference(
    config: Config,
    model: Decoder,
    saved: TensorFiles,
    ranks: Ranks,
    mesh: Mesh,
    *,
    measure: ComputeLogps | None = None,
) -> FrozenReference:
    """Build the reference that is a frozen copy of the model that the run started from.

    Args:
        measure: computes the log-probabilities; None: those of pairs.
    """
    copy = open_reference_model(config, mesh)
    if saved.names:
        for weight_name, weight in named_weights(copy).items():
            weight.set_value(saved.read(weight_name))
    logger.info(f"reference: a frozen copy, {sum(weight.size for weight in named_weights(copy).values()):,} parameters")
    updated = config.dpo.ref_model_update_steps > 0
    return FrozenReference(copy, model, measure or log_prob_fn(config, ranks), updated=updated, ranks=ranks)


def precomputed_references(
    config: Config,
    model: Decoder,
    read: Mapping[str, PairBatches],
    saved: TensorFiles,
    ranks: Ranks,
    mesh: Mesh,
    *,
    fresh: bool,
) -> dict[str, PrecomputedReference]:
    """Build the references that are tables of the log-probabilities of every pair, fp32[pairs, 2].

    The values come from the checkpoint or the cache folder; missing ones are computed now. Every rank computes those of
    its pairs, and then all ranks have the full tables.
    """
    measure = log_prob_fn(config, ranks)
    reference = model if fresh and not config.dpo.ref_model_name_or_path else None
    tables = {}
    for name, pairs in read.items():
        table = np.full((len(pairs.dataset), 2), np.nan, np.float32)
        stored = saved.read(name) if name in saved.names else None
        if stored is not None and stored.shape == table.shape:
            table = stored
        if fresh or any(ranks.all_gather_object(has_missing_logps(table, pairs.batches()))):
            reference = reference or open_reference_model(config, mesh)
            with ranks.gather_params(reference.parameters()):
                path = table_path(cache_folder(config), pairs.dataset, reference, ranks, forward_precision(config))
            earlier = read_table(path, table.shape)
            table = np.where(np.isnan(table), earlier, table)
            started = time.monotonic()
            batches = progress(pairs.batches(), f"reference: {name}", unit="batches")
            count = precompute_missing_logps(table, batches, reference, measure, pairs.dataset.location, ranks)
            if count and ranks.is_main_process:
                write_table(path, table)
            seconds = (
                f"{count:,} pairs computed in {time.monotonic() - started:.1f} s" if count else "nothing to compute"
            )
            logger.info(f"reference: {name}: {seconds}, log-probabilities kept in {path}")
        tables[name] = PrecomputedReference(table)
    return tables
