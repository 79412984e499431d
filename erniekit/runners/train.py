"""Supervised fine-tuning and pre-training: parts in, result out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from erniekit.data.evaluation_plan import EvaluationPlan
from erniekit.data.plan import StepPlan
from erniekit.data.plan_version import PLAN_VERSION
from erniekit.data.prefetch import prefetch
from erniekit.environment import cpu_settings, package_versions
from erniekit.json_files import read_json_object
from erniekit.model.adapters.lora import base_fingerprint, held_adapters, save_adapters, trained_weights
from erniekit.model.decoder import Decoder
from erniekit.model.quantization.fp8 import write_averages
from erniekit.model.weights import GENERATION_CONFIG_FILE, named_weights, save_companions, save_model_folder
from erniekit.model.whole import Held, held
from erniekit.parallel.mesh import Mesh
from erniekit.parameters import Config
from erniekit.parameters.schema import PARAMETERS
from erniekit.parameters.training import peak_not_reached
from erniekit.runners.adapters import (
    adapter_plan,
    base_name,
    first_adapters,
    refuse_other_adapters,
    resolved_parameters,
)
from erniekit.runners.checkpoints import masters_of_checkpoints
from erniekit.runners.checks import what_divides_no_experts
from erniekit.runners.data_wiring import (
    count_steps,
    evaluates,
    evaluation_dataset,
    evaluation_plan,
    training_dataset,
    training_plan,
)
from erniekit.runners.evaluate import answering
from erniekit.runners.layout import divided_training, join_ranks, own_place
from erniekit.runners.optimizer import moment_storage
from erniekit.runners.own_model import parts_of
from erniekit.runners.precision import first_loss_scale
from erniekit.runners.reading import known_to_all, reader_of, reads_data
from erniekit.runners.wiring import (
    Say,
    announce_dense_mask,
    begin_training,
    first_weights,
    model_folder,
    objective_from,
    open_model,
)
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.commands import NO_COMMANDS, Commands
from erniekit.training.loop import Trainer
from erniekit.training.master_weights import in_place_of_weights
from erniekit.training.objectives import Objective
from erniekit.training.optimizer import describe_decay
from erniekit.training.output_folder import Start, open_output_folder
from erniekit.training.rank_files import WEIGHTS, own_part_of, refuse_other_layout, written_by_ranks
from erniekit.training.ranks import Ranks
from erniekit.training.result import TrainResult
from erniekit.training.run_identity import RunIdentity
from erniekit.training.settings import schedule_from, settings_from

# What decides which samples a step sees; a resumed run must have the same values.
BATCH_PARAMETERS = (
    "max_seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "greedy_intokens",
    "buffer_size", "random_shuffle", "mix_strategy", "num_samples_each_epoch",
)  # fmt: skip
# The same, added later: noted only where they are not their defaults, so that older checkpoints can be resumed from.
LATER_BATCH_PARAMETERS = ("batch_tokens", "max_batch_samples", "min_sample_len", "max_sample_len", "curriculum")


def run_training(config: Config, say: Say = print) -> TrainResult:
    """Train as `config` says and leave the model, its results and its logs in `output_dir`.

    Raises:
        UserError: anything the user can mend, before or during training.
    """
    model_config, tokenizer, template = begin_training(config, say)
    generation = _generation_settings(model_folder(config))
    output_dir = Path(config.basic.output_dir).expanduser()
    topology, rank = own_place(config, model_config)
    for line in what_divides_no_experts(config, model_config, topology):
        say(line)

    with _output_folder(config, output_dir, rank, say) as own_start:
        # before ranks wait for each other; those that read nothing are told by those that do
        reads = reads_data(config, topology, rank)
        own_dataset = training_dataset(config, tokenizer, template) if reads else None
        own_held_out = evaluation_dataset(config, tokenizer, template) if reads and evaluates(config) else None
        mesh = join_ranks(config, topology)
        start = Start.shared(own_start, mesh.exchange)
        reader = reader_of(config, mesh)
        dataset = known_to_all(config, mesh, own_dataset)
        held_out = known_to_all(config, mesh, own_held_out) if evaluates(config) else None
        plan = training_plan(config, dataset, reader)
        say(str(dataset.report))
        say(plan.describe(config.training.max_steps, config.training.num_train_epochs))
        total_steps = count_steps(config, plan, note=rank == 0)
        schedule = schedule_from(config, total_steps)
        if config.training.max_steps < 0 and schedule.kind != "constant" and total_steps <= schedule.warmup_steps:
            say(peak_not_reached(schedule.warmup_steps, total_steps))  # with max_steps it is one of config.messages
        workers = config.acceleration.dataloader_num_workers if reads else 0
        batches = [(dataset, config.training.per_device_train_batch_size)]
        if held_out is not None:
            say(str(held_out.report))
            batches.append((held_out, config.evaluation.per_device_eval_batch_size))
        announce_dense_mask(config, batches, say)

        in_parts = start.checkpoint if start.checkpoint and WEIGHTS in written_by_ranks(start.checkpoint) else None
        whole = None if in_parts else start.checkpoint  # parts are loaded once the model is divided
        adapters = adapter_plan(config, model_config, whole)
        if in_parts:
            refuse_other_adapters(in_parts, resolved_parameters(config, adapters, model_config))
        weights = whole if whole and not adapters else first_weights(config)
        model = open_model(config, weights, say, adapters=adapters, mesh=mesh)
        held_out_plan = None if held_out is None else evaluation_plan(config, held_out, reader)
        if config.basic.stage == "DPO":
            from erniekit.runners.dpo import keep_predictions

            keep_predictions(model, say)  # before anything asks what is trained
        parameters = trained_weights(model)
        on_rank = ", counted on this rank" if topology.tensor > 1 or topology.pipeline > 1 else ""
        say(describe_decay(parameters, config.training.weight_decay) + on_rank)
        if (storage := moment_storage(config)) is not None:
            say(f"AdamW: {storage}")
        optimizer, ranks = divided_training(config, mesh, model, parameters)
        parts = parts_of(config, model, ranks)
        if in_parts:
            refuse_other_layout(in_parts, ranks)
            parts.load_model(own_part_of(in_parts, ranks))
        masters = masters_of_checkpoints(config, model_config, resumes_parts=in_parts is not None)

        def write_model(folder: Path | None, weights: Held | None = None) -> None:
            _write_model(model, folder, tokenizer.files, generation, config, ranks, weights)

        def write_masters(folder: Path | None) -> None:
            write_model(folder, in_place_of_weights(held(named_weights(model)), optimizer, parameters))

        objective, evaluation_objective = _objectives(
            config, model, (plan, total_steps), held_out_plan, start.checkpoint, say, ranks, mesh
        )
        trainer = Trainer(
            model=model,
            parameters=parameters,
            optimizer=optimizer,
            schedule=schedule,
            plan=plan,
            objective=objective,
            evaluation_objective=evaluation_objective,
            further_figures=None if held_out is None else answering(config, tokenizer, template, output_dir, mesh),
            settings=settings_from(config, total_steps),
            identity=RunIdentity(
                seed=config.training.seed,
                data_fingerprint=dataset.fingerprint,
                batches=_batch_settings(config, reader.data_world),
                cpu_settings=cpu_settings(),
                versions=package_versions(),
                base_weights=base_fingerprint(model),
            ),
            resolved_config=resolved_parameters(config, adapters, model_config),
            write_model=write_model,
            write_checkpoint_model=write_masters if masters.stored == "as weights" else None,
            masters=masters,
            evaluation_plan=held_out_plan,
            callbacks=_callbacks(config, output_dir, say) if ranks.is_first else (),
            commands=Commands.of_run(output_dir) if ranks.is_first else NO_COMMANDS,
            ranks=ranks,
            parts=parts,
            first_loss_scale=first_loss_scale(config),
            read=lambda first, stop: prefetch(plan, first, workers, stop),
            describe_sample=dataset.location,
            describe_evaluation_sample=str if held_out is None else held_out.location,
            say=say,
        )
        return trainer.fit(start)


def _objectives(
    config: Config,
    model: Decoder,
    training: tuple[StepPlan, int],
    evaluation: EvaluationPlan | None,
    checkpoint: Path | None,
    say: Say,
    ranks: Ranks,
    mesh: Mesh,
) -> tuple[Objective, Objective]:
    """What training minimises, and what evaluation measures."""
    if config.basic.stage != "DPO":
        objective = objective_from(config)
        return objective, objective
    from erniekit.runners.dpo import preference_objectives

    return preference_objectives(config, model, training, evaluation, checkpoint, say, ranks, mesh)


def _batch_settings(config: Config, readers: int) -> dict[str, Any]:
    """What decides which samples a step sees. Twice the ranks with half the accumulation see the same."""
    later = [name for name in LATER_BATCH_PARAMETERS if config[name] != PARAMETERS[name].default]
    settings = {name: config[name] for name in (*BATCH_PARAMETERS, *later)} | {"plan_version": PLAN_VERSION}
    return settings | {"gradient_accumulation_steps": readers * config.training.gradient_accumulation_steps}


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
    weights: Held | None = None,
) -> None:
    """Write the trained model; without a folder, give what this rank holds of it to the one that writes.

    Args:
        weights: other values of those that this rank has, where adapters are not trained.
    """
    if config.lora.lora:
        save_adapters(model, folder, base_name(config), ranks.whole(held_adapters(model)))
    else:
        limit = int(config.checkpoint.max_shard_size * 10**9)
        whole = ranks.whole(weights or held(named_weights(model)))
        save_model_folder(model, folder, tokenizer_files, max_shard_bytes=limit, whole=whole)
    averages = model.activation_scales.averages() if model.activation_scales else None
    if folder is None:
        return
    if averages is not None:
        write_averages(folder, averages)
    if config.lora.lora:
        save_companions(model, folder, tokenizer_files)
    path = folder / GENERATION_CONFIG_FILE
    merged = {**json.loads(path.read_text(encoding="utf-8")), **generation}
    path.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _output_folder(config: Config, output_dir: Path, rank: int, say: Say) -> Iterator[Start | None]:
    """The first rank has the folder for itself, and finds where to start; to the others it tells that."""
    if rank > 0:
        yield None
        return
    with open_output_folder(
        output_dir,
        resume_from_checkpoint=config.checkpoint.resume_from_checkpoint,
        overwrite_output_dir=config.basic.overwrite_output_dir,
        model_folder=model_folder(config),
        weights_from=first_adapters(config) or first_weights(config),
        say=say,
    ) as start:
        yield start


def _callbacks(config: Config, output_dir: Path, say: Say) -> Sequence[object]:
    return default_callbacks(
        output_dir,
        logging_dir=Path(config.basic.logging_dir).expanduser(),
        report_to=config.basic.report_to,
        disable_tqdm=config.basic.disable_tqdm,
        say=say,
    )
