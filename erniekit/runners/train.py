"""Supervised fine-tuning and pre-training: parts in, result out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from erniekit.build.adapters import (
    adapter_plan,
    base_name,
    initial_adapters,
    refuse_other_adapters,
    resolved_parameters,
)
from erniekit.build.checkpoint import master_weight_policy, shards_of
from erniekit.build.checks import expert_parallel_warnings
from erniekit.build.data import (
    broadcast_dataset_index,
    count_steps,
    dp_rank_of,
    evaluates,
    evaluation_dataset,
    evaluation_plan,
    reads_data,
    training_dataset,
    training_plan,
)
from erniekit.build.distributed import join_ranks, moment_storage, optimizer_and_ranks, topology_and_rank
from erniekit.build.model import (
    announce_dense_mask,
    begin_training,
    initial_weights,
    model_folder,
    objective_from,
    open_model,
)
from erniekit.build.precision import initial_loss_scale
from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.training import peak_lr_not_reached
from erniekit.data import PLAN_VERSION
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import prefetch
from erniekit.data.sampler import StepPlan
from erniekit.distributed.mesh import Mesh
from erniekit.environment import cpu_settings, package_versions
from erniekit.json_files import read_json_object
from erniekit.model.decoder import Decoder
from erniekit.model.local_tensors import LocalTensors, local_tensors
from erniekit.model.lora.lora import base_fingerprint, local_adapters, named_trainable_parameters, save_adapters
from erniekit.model.quantization.fp8 import write_averages
from erniekit.model.weights import GENERATION_CONFIG_FILE, named_weights, save_companion_files, save_model_folder
from erniekit.runners.evaluate import build_generation_evaluator
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.checkpoint.master_weights import master_weights_as_model
from erniekit.training.checkpoint.resume import RunIdentity, Start, open_output_folder
from erniekit.training.checkpoint.sharded import WEIGHTS, check_same_layout, local_shard_of, sharded_kinds
from erniekit.training.collectives import Ranks
from erniekit.training.control import NO_COMMANDS, Commands
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.objective import Objective
from erniekit.training.optim.adamw import describe_decay
from erniekit.training.optim.schedules import check_schedule_fits
from erniekit.training.trainer import Trainer, TrainResult

logger = logging.getLogger(__name__)

# What decides which samples a step sees; a resumed run must have the same values.
BATCH_PARAMETERS = (
    "max_seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "greedy_intokens",
    "buffer_size", "random_shuffle", "mix_strategy", "num_samples_each_epoch",
)  # fmt: skip
# The same, added later: noted only where they are not their defaults, so that older checkpoints can be resumed from.
LATER_BATCH_PARAMETERS = ("batch_tokens", "max_batch_samples", "min_sample_len", "max_sample_len", "curriculum")


def run_training(config: Config) -> TrainResult:
    """Train as `config` says and leave the model, its results and its logs in `output_dir`.

    Raises:
        UserError: anything the user can mend, before or during training.
    """
    model_config, tokenizer, template = begin_training(config)
    generation = _generation_settings(model_folder(config))
    output_dir = config.output_dir
    topology, rank = topology_and_rank(config, model_config)
    for line in expert_parallel_warnings(config, model_config, topology):
        logger.info(line)

    with _output_folder(config, output_dir, rank) as local_start:
        # before ranks wait for each other; those that read nothing are told by those that do
        reads = reads_data(config, topology, rank)
        local_dataset = training_dataset(config, tokenizer, template) if reads else None
        local_held_out = evaluation_dataset(config, tokenizer, template) if reads and evaluates(config) else None
        mesh = join_ranks(config, topology)
        start = Start.broadcast(local_start, mesh.all_gather_object)
        dp_rank = dp_rank_of(config, mesh)
        dataset = broadcast_dataset_index(config, mesh, local_dataset)
        held_out = broadcast_dataset_index(config, mesh, local_held_out) if evaluates(config) else None
        plan = training_plan(config, dataset, dp_rank)
        logger.info(str(dataset.report))
        logger.info(plan.describe(config.training.max_steps, config.training.num_train_epochs))
        total_steps = count_steps(config, plan, note=rank == 0)
        check_schedule_fits(config.training, total_steps)
        warmup_steps, warms_up = config.training.warmup_steps, config.training.lr_scheduler_type != "constant"
        if config.training.max_steps < 0 and warms_up and total_steps <= warmup_steps:
            logger.info(peak_lr_not_reached(warmup_steps, total_steps))  # with max_steps it is one of config.messages
        workers = config.acceleration.dataloader_num_workers if reads else 0
        batches = [(dataset, config.training.per_device_train_batch_size)]
        if held_out is not None:
            logger.info(str(held_out.report))
            batches.append((held_out, config.evaluation.per_device_eval_batch_size))
        announce_dense_mask(config, batches)

        sharded_checkpoint = (
            start.checkpoint if start.checkpoint and WEIGHTS in sharded_kinds(start.checkpoint) else None
        )
        full_checkpoint = None if sharded_checkpoint else start.checkpoint  # parts are loaded once the model is divided
        adapters = adapter_plan(config, model_config, full_checkpoint)
        if sharded_checkpoint:
            refuse_other_adapters(sharded_checkpoint, resolved_parameters(config, adapters, model_config))
        weights = full_checkpoint if full_checkpoint and not adapters else initial_weights(config)
        model = open_model(config, weights, adapters=adapters, mesh=mesh)
        held_out_plan = None if held_out is None else evaluation_plan(config, held_out, dp_rank)
        if config.basic.stage == "DPO":
            from erniekit.runners.dpo import freeze_mtp

            freeze_mtp(model)  # before anything asks what is trained
        parameters = named_trainable_parameters(model)
        on_rank = ", counted on this rank" if topology.tensor > 1 or topology.pipeline > 1 else ""
        logger.info(describe_decay(parameters, config.training.weight_decay) + on_rank)
        if (storage := moment_storage(config)) is not None:
            logger.info(f"AdamW: {storage}")
        optimizer, ranks = optimizer_and_ranks(config, mesh, model, parameters)
        shards = shards_of(config, model, ranks)
        if sharded_checkpoint:
            check_same_layout(sharded_checkpoint, ranks)
            shards.load_model(local_shard_of(sharded_checkpoint, ranks))
        master_weights = master_weight_policy(config, model_config, resumes_shards=sharded_checkpoint is not None)

        def write_model(folder: Path | None, weights: LocalTensors | None = None) -> None:
            _write_model(model, folder, tokenizer.files, generation, config, ranks, weights)

        def write_master_weights(folder: Path | None) -> None:
            write_model(folder, master_weights_as_model(local_tensors(named_weights(model)), optimizer, parameters))

        objective, evaluation_objective = _objectives(
            config, model, (plan, total_steps), held_out_plan, start.checkpoint, ranks, mesh
        )
        run_evaluation = None
        if held_out is not None and held_out_plan is not None:
            run_evaluation = partial(
                evaluate,
                model,
                held_out_plan,
                evaluation_objective,
                max_batches=config.evaluation.max_evaluate_steps,
                describe_sample=held_out.location,
                extra_metrics=build_generation_evaluator(config, tokenizer, template, output_dir, mesh),
                ranks=ranks,
            )
        trainer = Trainer(
            model=model,
            parameters=parameters,
            optimizer=optimizer,
            plan=plan,
            objective=objective,
            config=config,
            total_steps=total_steps,
            identity=RunIdentity(
                seed=config.training.seed,
                data_fingerprint=dataset.fingerprint,
                batches=_batch_settings(config, dp_rank.dp_world_size),
                cpu_settings=cpu_settings(),
                versions=package_versions(),
                base_weights=base_fingerprint(model),
            ),
            resolved_config=resolved_parameters(config, adapters, model_config),
            write_model=write_model,
            write_checkpoint_model=write_master_weights if master_weights.stored == "as weights" else None,
            master_weights=master_weights,
            run_evaluation=run_evaluation,
            callbacks=default_callbacks(config.basic, skip_missing_trackers=not config.is_set("report_to"))
            if ranks.is_main_process
            else (),
            commands=Commands.for_run(output_dir) if ranks.is_main_process else NO_COMMANDS,
            ranks=ranks,
            shards=shards,
            initial_loss_scale=initial_loss_scale(config),
            read_steps=lambda first, stop: prefetch(plan, first, workers, stop),
            describe_sample=dataset.location,
        )
        return trainer.fit(start)


def _objectives(
    config: Config,
    model: Decoder,
    training: tuple[StepPlan, int],
    evaluation: EvaluationPlan | None,
    checkpoint: Path | None,
    ranks: Ranks,
    mesh: Mesh,
) -> tuple[Objective, Objective]:
    """What training minimises, and what evaluation measures."""
    if config.basic.stage != "DPO":
        objective = objective_from(config)
        return objective, objective
    from erniekit.runners.dpo import preference_objectives

    return preference_objectives(config, model, training, evaluation, checkpoint, ranks, mesh)


def _batch_settings(config: Config, dp_world_size: int) -> dict[str, Any]:
    """What decides which samples a step sees. Twice the ranks with half the accumulation see the same."""
    later = [name for name in LATER_BATCH_PARAMETERS if config[name] != PARAMETERS[name].default]
    settings = {name: config[name] for name in (*BATCH_PARAMETERS, *later)} | {"plan_version": PLAN_VERSION}
    return settings | {"gradient_accumulation_steps": dp_world_size * config.training.gradient_accumulation_steps}


def _generation_settings(folder: Path) -> Mapping[str, Any]:
    """What the model's folder says of generation beside the ids of its tokens; read early, for a run may take days."""
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return {}
    return read_json_object(path)


def _write_model(
    model: Decoder,
    folder: Path | None,
    tokenizer_files: Iterable[Path],
    generation: Mapping[str, Any],
    config: Config,
    ranks: Ranks,
    weights: LocalTensors | None = None,
) -> None:
    """Write the trained model; without a folder, give what this rank holds of it to the one that writes.

    Args:
        weights: other values of those that this rank has, where adapters are not trained.
    """
    if config.lora.lora:
        save_adapters(model, folder, base_name(config), ranks.full_tensors(local_adapters(model)))
    else:
        limit = int(config.checkpoint.max_shard_size * 10**9)
        full_tensors = ranks.full_tensors(weights or local_tensors(named_weights(model)))
        save_model_folder(model, folder, tokenizer_files, max_shard_bytes=limit, full_tensors=full_tensors)
    averages = model.activation_scales.averages() if model.activation_scales else None
    if folder is None:
        return
    if averages is not None:
        write_averages(folder, averages)
    if config.lora.lora:
        save_companion_files(model, folder, tokenizer_files)
    path = folder / GENERATION_CONFIG_FILE
    merged = {**json.loads(path.read_text(encoding="utf-8")), **generation}
    path.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _output_folder(config: Config, output_dir: Path, rank: int) -> Iterator[Start | None]:
    """The first rank has the folder for itself, and finds where to start; to the others it tells that."""
    if rank > 0:
        yield None
        return
    with open_output_folder(
        output_dir,
        resume_from_checkpoint=config.checkpoint.resume_from_checkpoint,
        overwrite_output_dir=config.basic.overwrite_output_dir,
        model_folder=model_folder(config),
        weights_from=initial_adapters(config) or initial_weights(config),
    ) as start:
        yield start
