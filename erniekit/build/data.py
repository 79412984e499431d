"""Build the data of a run from its configuration: tokenised datasets, and the plan of samples for each step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.build.drawing import drawing_of, speech_settings_of
from erniekit.build.sources import evaluation_sources, training_sources
from erniekit.build.step_count import cache_folder, cache_step_count
from erniekit.config import Config
from erniekit.config.sections.schedule_rules import peak_lr_not_reached
from erniekit.config.sections.sft import SftParameters
from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import (
    ArrayMessage,
    deserialize_batches,
    deserialize_index,
    serialize_batches,
    serialize_index,
)
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.media.clip import AudioInputs
from erniekit.data.open_dataset import open_dataset, open_packed_dataset
from erniekit.data.packed import DataFingerprint
from erniekit.data.sampler import BatchSource, StepPlan, local_batches
from erniekit.data.templates.ernie import Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.distributed.topology import MODEL_AXES, Topology
from erniekit.hub.cache import chosen_hub, find_local_folder
from erniekit.hub.download import model_folder
from erniekit.json_files import read_json_object
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.training.optim.schedules import check_schedule_fits, warmup_steps_of

if TYPE_CHECKING:  # the launcher reads the data, and never imports Paddle
    from erniekit.distributed.mesh import Mesh

logger = logging.getLogger(__name__)


def training_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """Open the tokenised training data."""
    if "packed" in config.training.train_dataset_type:
        return open_packed_dataset(
            Path(config.training.train_dataset_path[0]).expanduser(),
            data_fingerprint_of(config, tokenizer, template),
            max_seq_len=config.training.max_seq_len,
            pad_id=tokenizer.pad_id,
            needs_scores=config.stage.reads_pairs and config.dpo.offset_alpha > 0,
            audio=audio_of_model(config),
            pair_window=pair_window(config),
        )
    return _dataset(config, tokenizer, template, training_sources(config))


def data_fingerprint_of(config: Config, tokenizer: Tokenizer, template: Template | None) -> DataFingerprint:
    """Return the fingerprint of what a pre-packed folder is made with."""
    audio = audio_of_model(config)
    return DataFingerprint(
        tokenizer.fingerprint,
        template.fingerprint if template else None,
        config.stage.reads_pairs,
        "" if audio is None else hashlib.blake2b(repr(audio.fingerprint).encode(), digest_size=8).hexdigest(),
        config.stage.reads_verdicts,
        config.stage.trains_score,
    )


def audio_inputs(model_config: ModelConfig) -> AudioInputs | None:
    """Return what the audio encoder of a model takes; None if it has none."""
    audio = model_config.architecture.audio
    return None if audio is None else AudioInputs(*audio(model_config))


def audio_of_model(config: Config) -> AudioInputs | None:
    """Return what the audio encoder of `model_name_or_path` takes; None if it has none.

    Data can be previewed and packed with a tokenizer alone, so nothing else is asked of the folder.
    """
    folder = model_folder(config)
    architecture = _architecture_in(folder)
    if architecture is None or architecture.audio is None:
        return None
    return audio_inputs(ModelConfig.from_folder(folder, config.basic.ignore_config_keys))


def pair_window(config: Config) -> int | None:
    """Return the positions beyond which pairs have their prompt twice: the narrowest window to which layers attend, of
    the model or its reference. None where none is narrower than rows can be, or the stage reads no pairs."""
    if not (config.stage.reads_pairs or config.stage.reads_verdicts):
        return None
    folders = [model_folder(config)]
    if name := config.dpo.ref_model_name_or_path:
        folders += [folder for folder in [find_local_folder(name, chosen_hub(config))] if folder is not None]
    ignored = config.basic.ignore_config_keys
    models = [ModelConfig.from_folder(folder, ignored) for folder in folders if _architecture_in(folder) is not None]
    narrowest = min((window for model in models for window in model.windows), default=None)
    return None if narrowest is None or narrowest >= config.training.max_seq_len else narrowest


def _architecture_in(folder: Path) -> Architecture | None:
    """Return the architecture of the model in a folder; None if there is none, or one that is not known here."""
    path = folder / "config.json"
    return ARCHITECTURES.get(str(read_json_object(path).get("model_type"))) if path.is_file() else None


def evaluates(config: Config) -> bool:
    """Return whether the run evaluates during training."""
    return config.basic.do_eval and config.evaluation.evaluation_strategy != "no"


def has_evaluation_data(config: Config) -> bool:
    """Return whether there are held-out records, in files of their own or in those of training."""
    return bool(config.evaluation.eval_dataset_path or config.evaluation.eval_split)


def evaluation_dataset(config: Config, tokenizer: Tokenizer, template: Template | None) -> Dataset:
    """Open the tokenised evaluation data."""
    return _dataset(config, tokenizer, template, evaluation_sources(config))


def _dataset(config: Config, tokenizer: Tokenizer, template: Template | None, sources: list[Source]) -> Dataset:
    drawing = drawing_of(config, tokenizer, sources)
    return open_dataset(
        sources,
        tokenizer,
        template,
        cache_dir=cache_folder(config),
        audio=audio_of_model(config),
        drawing=drawing,
        speech=speech_settings_of(config, drawing) if isinstance(drawing, (MaskedCodes, ArNarCodes)) else None,
        **sample_limits(config),
    )


def sample_limits(config: Config) -> dict[str, Any]:
    """Return the limits that a record must keep to become a sample, and what happens otherwise; see `open_dataset`."""
    return {
        "max_seq_len": config.training.max_seq_len,
        "over_length": config.sft.over_length_policy,
        "max_prompt_len": config.dpo.max_prompt_len,
        "needs_scores": config.dpo.offset_alpha > 0,
        "on_bad_record": config.sft.on_bad_record,
        "split_multi_turn": config.sft.split_multi_turn,
        "scored": config.stage.trains_score,
        "pair_window": pair_window(config),
    }


@dataclass(frozen=True)
class DataParallelRank:
    """The data-parallel rank of a process, and the source of its share of every global batch; see `StepPlan`."""

    dp_rank: int = 0
    dp_world_size: int = 1
    multiple_of: int = 1
    batch_source: BatchSource = local_batches
    embeds: bool = True


def training_plan(config: Config, dataset: Dataset, dp_rank: DataParallelRank = DataParallelRank()) -> StepPlan:
    """Return the plan that assigns samples to optimizer steps."""
    if dataset.packed is not None:
        return StepPlan(
            dataset,
            max_seq_len=config.training.max_seq_len,
            packing=False,
            greedy=False,
            window=1,
            batch_size=config.training.per_device_train_batch_size,
            accumulation=config.training.gradient_accumulation_steps,
            shuffle=False,
            packs=dataset.packed.packs,
            batch_tokens=dataset.packed.batch_tokens,
            **vars(dp_rank),
        )
    return StepPlan(
        dataset,
        max_seq_len=config.training.max_seq_len,
        packing=config.acceleration.packing,
        greedy=config.acceleration.greedy_intokens,
        window=config.acceleration.buffer_size,
        batch_size=config.training.per_device_train_batch_size,
        accumulation=config.training.gradient_accumulation_steps,
        seed=config.training.seed,
        shuffle=config.training.random_shuffle,
        strategy=config.sft.mix_strategy,
        num_samples_each_epoch=config.sft.num_samples_each_epoch,
        repeat_samples=config.sft.num_samples_each_epoch != SftParameters.num_samples_each_epoch,
        sorted_first=config.sft.curriculum in ("length", "duration"),
        by_duration=config.sft.curriculum == "duration",
        by_speaker=config.speech.sample_order == "speaker",
        **_length_groups(config),
        **vars(dp_rank),
    )


def _length_groups(config: Config) -> dict[str, Any]:
    """Return the arguments of batches by length (`batch_tokens`, `batch_seconds`); empty if they are off."""
    section = config.acceleration
    if config.speech.batch_seconds:
        return {"batch_seconds": config.speech.batch_seconds, "max_batch_samples": section.max_batch_samples}
    if not section.batch_tokens:
        return {}
    return {
        "batch_tokens": section.batch_tokens,
        "max_batch_samples": section.max_batch_samples,
        "shortest": section.min_sample_len,
        "longest": section.max_sample_len,
    }


def evaluation_plan(
    config: Config,
    dataset: Dataset,
    dp_rank: DataParallelRank = DataParallelRank(),
) -> EvaluationPlan:
    """Return the plan that evaluates every sample once, in the order of the files, without sources of probability 0."""
    return EvaluationPlan(
        dataset,
        max_seq_len=config.training.max_seq_len,
        packing=config.acceleration.packing,
        greedy=config.acceleration.greedy_intokens,
        window=config.acceleration.buffer_size,
        batch_size=config.evaluation.per_device_eval_batch_size,
        **_length_groups(config),
        **vars(dp_rank),
    )


class LocalData(NamedTuple):
    """The datasets that this rank has opened; None if the run has none, or if another rank reads it."""

    training: Dataset | None
    evaluation: Dataset | None


@dataclass(frozen=True)
class RunData:
    """The plans of the data that a training run reads.

    Attributes:
        plan: the plan of the training steps.
        total_steps: the number of optimizer steps in the run.
        evaluation_plan: the plan of the evaluations; None if the run does not evaluate.
        dp_rank: the data-parallel rank, which determines this rank's share of every global batch.
        workers: the number of threads that prepare batches ahead; 0 if this rank opens no files.
    """

    plan: StepPlan
    total_steps: int
    evaluation_plan: EvaluationPlan | None
    dp_rank: DataParallelRank
    workers: int


def open_local_data(
    config: Config, tokenizer: Tokenizer, template: Template | None, topology: Topology, rank: int
) -> LocalData:
    """Open the data of a training run if this rank reads files. There is no communication.

    Raises:
        DataError: a record cannot be used.
    """
    if not reads_data(config, topology, rank):
        return LocalData(None, None)
    evaluation = evaluation_dataset(config, tokenizer, template) if evaluates(config) else None
    return LocalData(training_dataset(config, tokenizer, template), evaluation)


def plan_run_data(config: Config, local: LocalData, mesh: Mesh) -> RunData:
    """Plan the steps of a training run, and log the size of its data.

    Raises:
        ConfigurationError: the learning-rate schedule does not fit into the run.
    """
    dp_rank = dp_rank_of(config, mesh)
    dataset = broadcast_dataset_index(config, mesh, local.training)
    held_out = broadcast_dataset_index(config, mesh, local.evaluation) if evaluates(config) else None
    plan = training_plan(config, dataset, dp_rank)
    logger.info(str(dataset.report))
    logger.info(plan.describe(config.training.max_steps, config.training.num_train_epochs))
    total_steps = count_steps(config, plan, note=mesh.rank == 0)
    check_schedule_fits(config.training, total_steps)
    warmup_steps = warmup_steps_of(config.training, total_steps)
    warms_up = config.training.lr_scheduler_type != "constant"
    if config.training.max_steps < 0 and warms_up and total_steps <= warmup_steps:
        logger.info(peak_lr_not_reached(warmup_steps, total_steps))  # with max_steps it is one of config.messages
    if held_out is not None:
        logger.info(str(held_out.report))
    workers = 0 if local.training is None else config.acceleration.dataloader_num_workers
    plan_of_evaluation = None if held_out is None else evaluation_plan(config, held_out, dp_rank)
    return RunData(plan, total_steps, plan_of_evaluation, dp_rank, workers)


def count_steps(config: Config, plan: StepPlan, *, note: bool = True) -> int:
    """Return the exact number of steps of the run; with `note`, cache it for `erniekit validate`.

    It is not cached where the model listens, nor where samples differ from epoch to epoch: the steps depend on their
    lengths, which only reading recordings and alignments tells.
    """
    steps = plan.total_steps(config.training.max_steps, config.training.num_train_epochs)
    if note and plan.dataset.audio is None and not plan.dataset.varies:
        cache_step_count(config, steps, dp_world_size=plan.dp_world_size)
    return steps


# How ranks receive their data. The ranks of one pipeline and tensor group compute the same micro-batches. Each of them
# reads the files, or, with `distributed_dataloader`, only the first one does; it broadcasts the index of the dataset
# and every micro-batch to the others.


def reads_data(config: Config, topology: Topology, rank: int) -> bool:
    """Return whether this rank opens data files."""
    coords = topology.coordinates(rank)
    return not config.acceleration.distributed_dataloader or coords.pipeline == coords.tensor == 0


def dp_rank_of(config: Config, mesh: Mesh) -> DataParallelRank:
    """Return the data-parallel rank of this process, which reads its batches or receives them by broadcast."""
    from erniekit.distributed.broadcast import broadcast_arrays

    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None

    def broadcast_batches(read: Callable[[], list[Batch]]) -> list[Batch]:
        message = serialize_batches(read()) if mesh.is_first(*MODEL_AXES) else ArrayMessage([], [])
        return deserialize_batches(ArrayMessage(*broadcast_arrays(*message, group)))

    slices = mesh.topology.tensor if mesh.topology.sequence_parallel else 1  # of the tokens of a micro-batch
    return DataParallelRank(
        mesh.dp_rank,
        mesh.topology.dp_world_size,
        slices,
        local_batches if group is None else broadcast_batches,
        embeds=mesh.is_first("pipeline"),
    )


def broadcast_dataset_index(config: Config, mesh: Mesh, dataset: Dataset | None) -> Dataset:
    """Return the dataset that this rank has opened, or the index that the rank which reads the files broadcasts."""
    from erniekit.distributed.broadcast import broadcast_arrays

    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None
    if group is None:
        assert dataset is not None
        return dataset
    message = ArrayMessage(
        *broadcast_arrays(*(serialize_index(dataset) if dataset is not None else ArrayMessage([], [])), group)
    )
    return dataset if dataset is not None else deserialize_index(message, audio_of_model(config))
