"""Train a model, from a configuration to the result of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import cast

from paddle import Tensor

from erniekit.build.adapters import resolved_parameters
from erniekit.build.checkpoint import (
    ModelWriter,
    load_own_shard,
    master_weight_policy,
    model_source,
    open_run_folder,
    run_identity,
    shards_of,
    with_checkpoint_here,
)
from erniekit.build.checks import read_generation_config
from erniekit.build.codec_folder import codec_candidates, differing_codecs
from erniekit.build.data import RunData, open_local_data, plan_run_data
from erniekit.build.distributed import join_ranks, moment_storage, optimizer_and_ranks, topology_and_rank
from erniekit.build.model import announce_dense_mask, begin, model_folder, open_model
from erniekit.build.parts import relative_learning_rates
from erniekit.build.precision import initial_loss_scale, loss_scale_bounds
from erniekit.build.sources import training_sources
from erniekit.build.speech import codec_of_run
from erniekit.build.text_reading import TextReading, read_text_reading, write_text_reading
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.data.loader import prefetch
from erniekit.data.split import read_part
from erniekit.data.templates.ernie import Template, published_files
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import SpokenText
from erniekit.distributed.mesh import Mesh
from erniekit.distributed.topology import Topology
from erniekit.inference.speaking.pace import measured_pace
from erniekit.launch.data_ahead import wait_for_data
from erniekit.model.decoder import Decoder
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.rollouts.collapse import CollapseWarnings
from erniekit.runners.evaluate import build_generation_evaluator
from erniekit.runners.on_policy import ReadSteps, with_own_answers
from erniekit.runners.policy import PolicyData, RunParts, plan_prompts, policy_run, read_prompts
from erniekit.runners.stages import prepare_model, stage_objectives
from erniekit.training.callbacks import Callback
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.checkpoint.resume import Start
from erniekit.training.collectives import Ranks
from erniekit.training.control import NO_COMMANDS, Commands
from erniekit.training.evaluation import EvaluationResult, ExtraMetrics, Plan, evaluate
from erniekit.training.objectives.objective import Objective
from erniekit.training.optim.adamw import describe_decay
from erniekit.training.result import TrainResult
from erniekit.training.saving import RunFolder
from erniekit.training.trainer import Trainer

logger = logging.getLogger(__name__)

MEASURED_RECORDINGS = 2000  # which tell how fast a data set is spoken


def run_training(config: Config) -> TrainResult:
    """Train as `config` says and leave the model, its results and its logs in `output_dir`.

    Raises:
        UserError: the configuration, the data, the model or the machine does not allow the run, or it failed.
    """
    model_config, tokenizer, template = begin(config)
    generation = read_generation_config(model_folder(config))
    topology, rank = topology_and_rank(config, model_config)
    with open_run_folder(config, rank) as local_start:
        wait_for_data()
        # before ranks wait for each other
        prompts = (
            None if template is None or not config.stage.reads_prompts else read_prompts(config, tokenizer, template)
        )
        local_data = open_local_data(config, tokenizer, template, topology, rank) if prompts is None else None
        mesh = join_ranks(config, topology)
        start = with_checkpoint_here(config, Start.broadcast(local_start, mesh.all_gather_object))
        data: RunData | PolicyData
        if prompts is not None:
            data = plan_prompts(config, prompts, mesh)
        else:
            assert local_data is not None
            data = plan_run_data(config, local_data, mesh)
            held_out = None if data.evaluation_plan is None else data.evaluation_plan.dataset
            announce_dense_mask(config, data.plan.dataset, held_out)

        source = model_source(config, model_config, start.checkpoint)
        model = open_model(config, source.weights, adapters=source.adapters, mesh=mesh)
        prepare_model(config, model)
        parameters = named_trainable_parameters(model)
        _describe_optimizer(config, parameters, topology)
        optimizer, ranks = optimizer_and_ranks(config, mesh, model, parameters)
        shards = shards_of(config, model, ranks)
        load_own_shard(source, shards, ranks)
        master_weights = master_weight_policy(config, model_config, resumes_shards=bool(source.sharded_checkpoint))
        tokenizer_files = published_files(tokenizer) if config.stage.reads_dialogues else tokenizer.files
        writer = ModelWriter(config, model, ranks, tokenizer_files, generation)
        write_checkpoint: Callable[[Path | None], None] = writer.write
        if master_weights.stored == "as weights":
            write_checkpoint = partial(writer.write_master_weights, optimizer, parameters)

        if isinstance(data, PolicyData):
            assert template is not None
            parts = policy_run(config, model, data, tokenizer, template, start.checkpoint, ranks, mesh)
        else:
            parts = _of_samples(config, model, data, tokenizer, template, start.checkpoint, ranks, mesh)
        if config.stage.reads_codes:
            _tell_codes(config, writes=ranks.is_main_process)
        folder = RunFolder(
            config=config,
            identity=run_identity(config, model, data),
            resolved_config=resolved_parameters(config, source.adapters, model_config),
            parameters=parameters,
            optimizer=optimizer,
            write_model=writer.write,
            write_checkpoint_model=write_checkpoint,
            master_weights=master_weights,
            shards=shards,
            extra_state=parts.objective.extra_state,
            ranks=ranks,
        )
        trainer = Trainer(
            model=model,
            parameters=parameters,
            optimizer=optimizer,
            plan=cast(Plan, data.plan),  # of prompts: its steps come from `read_steps`
            objective=parts.objective,
            config=config,
            total_steps=data.total_steps,
            folder=folder,
            run_evaluation=parts.run_evaluation,
            callbacks=_callbacks(config) if ranks.is_main_process else (),
            commands=Commands.for_run(config.output_dir) if ranks.is_main_process else NO_COMMANDS,
            ranks=ranks,
            initial_loss_scale=initial_loss_scale(config),
            loss_scale_bounds=loss_scale_bounds(config),
            read_steps=parts.read_steps,
            relative_learning_rates=relative_learning_rates(
                config, model_config, source.adapters.settings if source.adapters else None
            ),
            describe_sample=data.plan.dataset.location,
        )
        try:
            return trainer.fit(start)
        finally:
            parts.close()


def _of_samples(
    config: Config,
    model: Decoder,
    data: RunData,
    tokenizer: Tokenizer,
    template: Template | None,
    checkpoint: Path | None,
    ranks: Ranks,
    mesh: Mesh,
) -> RunParts:
    """Build what a run minimises over the samples of its files, and how it is evaluated."""
    objective, of_evaluation = stage_objectives(config).training(config, model, data, checkpoint, ranks, mesh)
    evaluates = data.evaluation_plan is not None
    answers = build_generation_evaluator(config, tokenizer, template, mesh) if evaluates else None
    return RunParts(
        objective,
        _steps(config, model, data, () if template is None else template.stop_token_ids),
        _evaluation(config, model, data, of_evaluation, answers, ranks),
    )


def _steps(config: Config, model: Decoder, data: RunData, stop_token_ids: Sequence[int]) -> ReadSteps:
    """Return what reads the steps of a run, some of which may train on answers that the model has just written."""

    def read(first: int, stop: int) -> Generator[Sequence[Batch], None, None]:
        return prefetch(data.plan, first, data.workers, stop)

    if not (config.applies("on_policy_ratio") and config.distillation.on_policy_ratio):
        return read
    return with_own_answers(config, model, data.plan, stop_token_ids, data.dp_rank.multiple_of, read)


def _tell_codes(config: Config, *, writes: bool) -> None:
    """Log which codes are read, and write down how texts become ids, and how fast the data is spoken as far as its
    first recordings tell: so long the model takes for a text later, where nobody says it."""
    codec = codec_of_run(config)
    logger.info(f"codes: {codec}")
    sources = {"train_dataset_path": config.training.train_dataset_path}
    for other in differing_codecs(codec.folder, codec_candidates([model_folder(config)], sources)):
        logger.warning(
            f"codec: {codec.folder} has other weights than {other}, which belongs to the data or the model: codes of "
            "one codec are noise to another"
        )
    known = read_text_reading([model_folder(config)]) if config.basic.continue_training else None
    if known is not None and known.frontend != config.speech.text_frontend:
        logger.warning(
            f"text_frontend: {config.speech.text_frontend}, and the model has been trained with {known.frontend}: it "
            "learns to read anew"
        )
    if not writes or not codec.frame_rate:
        return
    items = chain.from_iterable(map(read_part, training_sources(config)))
    spoken = (record for item in items if isinstance(item, tuple) and isinstance(record := item[1], SpokenText))
    first = islice(spoken, MEASURED_RECORDINGS)
    pace = measured_pace((record.text, record.shape[1] / codec.frame_rate) for record in first)
    section = config.speech
    longest = section.prompt_seconds[1] if section.tts_objective == "ar_nar" else None
    reading = TextReading(section.text_frontend, pace, section.language_probability > 0, longest or None)
    write_text_reading(config.output_dir, reading)


def _describe_optimizer(config: Config, parameters: Mapping[str, Tensor], topology: Topology) -> None:
    on_rank = ", counted on this rank" if topology.tensor > 1 or topology.pipeline > 1 else ""
    logger.debug(describe_decay(parameters, config.training.weight_decay) + on_rank)
    if (storage := moment_storage(config)) is not None:
        logger.info(f"AdamW: {storage}")


def _evaluation(
    config: Config,
    model: Decoder,
    data: RunData,
    objective: Objective,
    extra_metrics: Callable[[Decoder], ExtraMetrics] | None,
    ranks: Ranks,
) -> Callable[[], EvaluationResult] | None:
    """Return the function that evaluates the model on held-out data; None where the run does not evaluate."""
    if data.evaluation_plan is None:
        return None
    return partial(
        evaluate,
        model,
        data.evaluation_plan,
        objective,
        max_batches=config.evaluation.max_evaluate_steps,
        describe_sample=data.evaluation_plan.dataset.location,
        extra_metrics=extra_metrics,
        ranks=ranks,
    )


def _callbacks(config: Config) -> Sequence[Callback]:
    """Return the callbacks of the run; a tracker that only the default names may be missing."""
    callbacks = default_callbacks(config.basic, skip_missing_trackers=not config.is_set("report_to"))
    return [*callbacks, CollapseWarnings()] if config.stage.reads_prompts else callbacks
