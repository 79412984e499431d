"""What preference training adds to a run: its objective, and the reference that it is measured against."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.build.adapters import adapter_plan, initial_adapters, parent_adapters
from erniekit.build.distributed import model_shard_arguments
from erniekit.build.model import (
    head_settings,
    initial_weights,
    open_model,
    read_model_config,
)
from erniekit.build.quantization import quantization_from
from erniekit.build.step_count import cache_folder
from erniekit.config import Config
from erniekit.config.sections.dpo import reference_mode
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.sampler import StepPlan
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.errors import ModelFileError
from erniekit.hub.cache import chosen_hub
from erniekit.hub.download import find_model_folder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.lora.config import PISSA
from erniekit.model.lora.fingerprint import weights_fingerprint
from erniekit.model.lora.folder import is_adapter_folder
from erniekit.model.lora.lora import named_adapter_weights
from erniekit.model.weights import named_weights
from erniekit.training.checkpoint.state import load_extra_state, load_state
from erniekit.training.checkpoint.tensors import NO_TENSORS, TensorFiles
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.preference import answer_log_probabilities, preference, reference_logps_function
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

# Log-probabilities of pairs under a reference model, kept on disk: one array for a set of pairs and a model.

TABLE_VERSION = 1  # raise it where the same pairs and weights come to other log-probabilities


def table_path(cache: Path, dataset: Dataset, model: Decoder, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Named by what the values depend on: the pairs, the weights, how they are multiplied, and the adapters; the
    same on every rank."""
    digest = hashlib.blake2b(digest_size=16)
    base = weights_fingerprint(model, ranks.all_gather_object)
    digest.update(repr((TABLE_VERSION, dataset.fingerprint, len(dataset), base)).encode())
    if model.activation_scales is not None:
        digest.update(repr(model.activation_scales.settings).encode())
    for name, weight in named_adapter_weights(model).items():
        digest.update(name.encode())
        digest.update(weight.numpy().tobytes())
    digests = dict.fromkeys(
        ranks.all_gather_object(digest.hexdigest())
    )  # one, unless ranks hold different parts of the model
    name = (
        "".join(digests)
        if len(digests) == 1
        else hashlib.blake2b(repr(list(digests)).encode(), digest_size=16).hexdigest()
    )
    return cache / "reference" / f"{name}.npy"


def read_table(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """fp32 of `shape`, NaN where nothing is known; a file that cannot be used counts as none."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        table = np.empty(0)
    return table if table.shape == shape and table.dtype == np.float32 else np.full(shape, np.nan, np.float32)


def write_table(path: Path, table: np.ndarray) -> None:
    """Replace the file as a whole. A disk that cannot be written is no reason to stop a run."""
    temp_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temp_path, "wb") as file:
            np.save(file, table, allow_pickle=False)
        os.replace(temp_path, path)
    except OSError as error:
        temp_path.unlink(missing_ok=True)
        logger.warning(f"{path} cannot be written ({error.strerror}): the next run measures its reference again")


TRAINING, EVALUATION = "training", "evaluation"
_LOG_EVERY_S = 20.0


@dataclass(frozen=True)
class Pairs:
    """Pairs that a run reads, and how: `batches` gives every batch that this rank will see in the run."""

    dataset: Dataset
    batches: Callable[[], Iterable[Batch]]


def preference_objectives(
    config: Config,
    model: Decoder,
    training: tuple[StepPlan, int],
    evaluation: EvaluationPlan | None,
    checkpoint: Path | None,
    ranks: Ranks = SINGLE_PROCESS,
    mesh: Mesh = SINGLE_PROCESS_MESH,
) -> tuple[Objective, Objective]:
    """The objectives of training and of evaluation in a run that trains `model`, with their reference.

    The reference is the model that the run starts from, also where it resumes, or `ref_model_name_or_path`.

    Args:
        training: the plan of the run and its number of steps.
        evaluation: the plan of every evaluation in the run.
        checkpoint: what the run resumes from; `model` has its weights.
        ranks, mesh: among which the run is divided.

    Raises:
        ModelFileError: the reference's folder cannot be used.
    """
    mode, fresh = reference_mode(config.dpo, lora=config.lora.lora), checkpoint is None
    saved = load_extra_state(checkpoint, ranks) if checkpoint else NO_TENSORS
    if mode == "precomputed":
        read = _pairs_of_run(config, training, evaluation, load_state(checkpoint).step if checkpoint else 0)
        tables = _precomputed_references(config, model, read, saved, ranks, mesh, fresh=fresh)
        objective = replace(
            _preference_objective(config, tables[TRAINING]),
            extra_state=lambda: {name: paddle.to_tensor(item.table) for name, item in tables.items()},
        )
        return objective, _preference_objective(config, tables.get(EVALUATION))
    if mode == "none":
        return _preference_objective(config, None), _preference_objective(config, None)
    reference: Reference
    if mode == "adapters":
        reference = _disabled_adapters_reference(config, model, saved, ranks, fresh=fresh)
    else:
        reference = _frozen_copy_reference(config, model, saved, ranks, mesh)

    def after_update(step: int) -> None:
        every = config.dpo.ref_model_update_steps
        if every > 0 and step % every == 0:
            reference.update()

    objective = replace(
        _preference_objective(config, reference), extra_state=reference.tensors, after_update=after_update
    )
    return objective, objective


def freeze_mtp(model: Decoder) -> None:
    """Freeze multi-token prediction layers, for which preferences are no loss: weight decay would wear them down."""
    if model.mtp:
        for parameter in model.mtp.parameters():
            parameter.stop_gradient = True
        logger.info("multi-token prediction layers stay as they are: preference training has no loss for them")


def _pairs_of_run(
    config: Config, training: tuple[StepPlan, int], evaluation: EvaluationPlan | None, first_step: int
) -> dict[str, Pairs]:
    plan, total_steps = training

    def trained() -> Iterator[Batch]:
        return chain.from_iterable(plan.micro_batches(step) for step in range(first_step, total_steps))

    read = {TRAINING: Pairs(plan.dataset, trained)}
    if evaluation is not None:
        available, limit = evaluation.steps_in_epoch(0), config.evaluation.max_evaluate_steps
        stop = min(limit, available) if limit > 0 else available
        read[EVALUATION] = Pairs(evaluation.dataset, lambda: (batch for _, batch in evaluation.local_steps(stop)))
    return read


def evaluation_objective(
    config: Config, model: Decoder, ranks: Ranks = SINGLE_PROCESS, mesh: Mesh = SINGLE_PROCESS_MESH
) -> Objective:
    """The preference loss for an evaluation on its own, among the ranks that it is divided among.

    The reference is `ref_model_name_or_path`; or of adapters those that their run started from, else their base. A
    whole model alone has none, and its rewards are then beta x log-probability.
    """
    if reference_mode(config.dpo, lora=config.lora.lora) == "none":
        return _preference_objective(config, None)
    measure = log_prob_fn(config, ranks)
    if config.dpo.ref_model_name_or_path:
        copy = open_reference_model(config, mesh)
        return _preference_objective(config, FrozenReference(copy, model, measure, updated=False, ranks=ranks))
    if config.lora.lora:
        model_config = read_model_config(config)
        adapters = adapter_plan(config, model_config)
        started_from = parent_adapters(adapters.folder) if adapters and adapters.folder else None
        # PiSSA has moved a part of the base into its adapters: put aside, they do not leave the base
        if started_from is not None or (adapters and adapters.settings.init == PISSA):
            logger.info(f"reference: {started_from or 'the base of the adapters'}, a frozen copy")
            shard_arguments = model_shard_arguments(config, model_config, mesh)
            quantization = quantization_from(config)
            other = build_model(
                model_config,
                initial_weights(config),
                adapters=started_from,
                quantization=quantization,
                **shard_arguments,
            )
            return _preference_objective(config, FrozenReference(other, model, measure, updated=False, ranks=ranks))
        logger.info("reference: the model with its adapters put aside")
        return _preference_objective(config, AdapterReference(model, measure, ranks=ranks))
    logger.info("reference: none; write ref_model_name_or_path to compare with the model before preference training")
    return _preference_objective(config, None)


def objective_of_pair(config: Config, model: Decoder, batch: Batch) -> Objective:
    """The preference loss on one batch alone, with `model` as it is now for its reference; keeps nothing on disk."""
    table = np.full((1 + max(sample for row in batch.samples for sample in row), 2), np.nan, np.float32)
    precompute_missing_logps(table, [batch], model, log_prob_fn(config))
    return _preference_objective(config, PrecomputedReference(table))


def _preference_objective(config: Config, reference: Reference | None) -> Objective:
    return preference(config.dpo, reference, **head_settings(config))


def open_reference_model(config: Config, mesh: Mesh = SINGLE_PROCESS_MESH) -> Decoder:
    """A model with the weights of the reference: `ref_model_name_or_path`, or what a fresh run would start from.

    It is divided among the ranks as the trained one is.

    Raises:
        ModelFileError: the folder cannot be used.
    """
    name = config.dpo.ref_model_name_or_path
    if not name:
        adapters = adapter_plan(config, read_model_config(config))
        # its lines would repeat those of the trained model
        return open_model(config, initial_weights(config), adapters=adapters, mesh=mesh, log_level=logging.DEBUG)
    folder = find_model_folder(name, chosen_hub(config), weights=True, parameter="ref_model_name_or_path")
    if is_adapter_folder(folder):
        raise ModelFileError(
            f"ref_model_name_or_path: {folder} holds adapters.\n"
            f"  Merge them into their base first: erniekit export {folder} --output DIR"
        )
    own, other = read_model_config(config), ModelConfig.from_folder(folder)
    if own.vocab_size != other.vocab_size:
        raise ModelFileError(
            f"ref_model_name_or_path: {folder} has a vocabulary of {other.vocab_size:,}, the trained model one of "
            f"{own.vocab_size:,}: they read different tokens\n  Write a reference with the trained model's tokenizer."
        )
    logger.info(f"reference: {folder}")
    return build_model(other, folder, **model_shard_arguments(config, other, mesh))


def log_prob_fn(config: Config, ranks: Ranks = SINGLE_PROCESS) -> ComputeLogps:
    """What takes the log-probabilities of answers as the objective does."""
    return reference_logps_function(answer_log_probabilities(**head_settings(config)), ranks)


def _disabled_adapters_reference(
    config: Config, model: Decoder, saved: TensorFiles, ranks: Ranks, *, fresh: bool
) -> AdapterReference:
    """New adapters are without effect, unless PiSSA has moved a part of the weights into them."""
    own = [name for name in named_adapter_weights(model) if name in saved.names]
    adapters = {name: paddle.to_tensor(saved.read(name)) for name in own}
    if fresh and (initial_adapters(config) is not None or config.lora.lora_init == PISSA):
        trained = named_adapter_weights(model)
        with ranks.gather_params(trained.values()):
            adapters = clone_tensors(trained)
    what = "the adapters that the run started from" if adapters else "its adapters put aside"
    logger.info(f"reference: the model with {what}")
    return AdapterReference(model, log_prob_fn(config, ranks), adapters or None, ranks)


def _frozen_copy_reference(
    config: Config, model: Decoder, saved: TensorFiles, ranks: Ranks, mesh: Mesh
) -> FrozenReference:
    copy = open_reference_model(config, mesh)
    if saved.names:
        for weight_name, weight in named_weights(copy).items():
            weight.set_value(saved.read(weight_name))
    logger.info(f"reference: a frozen copy, {sum(weight.size for weight in named_weights(copy).values()):,} parameters")
    updated = config.dpo.ref_model_update_steps > 0
    return FrozenReference(copy, model, log_prob_fn(config, ranks), updated=updated, ranks=ranks)


def _precomputed_references(
    config: Config,
    model: Decoder,
    read: Mapping[str, Pairs],
    saved: TensorFiles,
    ranks: Ranks,
    mesh: Mesh,
    *,
    fresh: bool,
) -> dict[str, PrecomputedReference]:
    """Tables of what every pair of the run has under the reference: from the checkpoint, from disk, or measured now.

    Every rank measures the pairs that it will see; all have the tables of all.
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
                path = table_path(cache_folder(config), pairs.dataset, reference, ranks)
            earlier = read_table(path, table.shape)
            table = np.where(np.isnan(table), earlier, table)
            started = time.monotonic()
            batches = _with_progress(pairs.batches(), name)
            count = precompute_missing_logps(table, batches, reference, measure, pairs.dataset.location, ranks)
            if count and ranks.is_main_process:
                write_table(path, table)
            seconds = (
                f"{count:,} pairs measured in {time.monotonic() - started:.1f} s" if count else "nothing to measure"
            )
            logger.info(f"reference: {name}: {seconds}, log-probabilities kept in {path}")
        tables[name] = PrecomputedReference(table)
    return tables


def _with_progress(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """The batches, with a line now and then."""
    due = time.monotonic() + _LOG_EVERY_S
    for number, batch in enumerate(batches):
        if time.monotonic() > due:
            logger.info(f"reference: {name}: {number:,} batches measured")
            due = time.monotonic() + _LOG_EVERY_S
        yield batch
