"""Supervised fine-tuning and pre-training: parts in, result out."""

from __future__ import annotations

import math
from pathlib import Path

from erniekit.data.plan import StepPlan
from erniekit.data.plan_version import PLAN_VERSION
from erniekit.data.prefetch import prefetch
from erniekit.environment import cpu_settings, package_versions
from erniekit.errors import ModelFileError
from erniekit.model.attention import dense_mask_bytes
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.parameters import Config
from erniekit.runners.wiring import (
    Say,
    check_vocabulary,
    count_steps,
    evaluation_dataset,
    evaluation_plan,
    model_folder,
    open_model,
    open_tokenizer,
    read_model_config,
    select_device,
    training_dataset,
    training_plan,
    uses_dense_mask,
)
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.loop import Trainer, TrainResult
from erniekit.training.objectives import Objective, supervised
from erniekit.training.optimizer import build_optimizer, describe_decay
from erniekit.training.output_folder import open_output_folder
from erniekit.training.run_identity import RunIdentity
from erniekit.training.settings import optimizer_settings_from, schedule_from, settings_from

# What decides which samples a step sees; a resumed run must have the same values.
BATCH_PARAMETERS = (
    "max_seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "packing", "greedy_intokens",
    "buffer_size", "random_shuffle", "mix_strategy", "num_samples_each_epoch",
)  # fmt: skip


def run_sft(config: Config, say: Say = print) -> TrainResult:
    """Train as `config` says and leave the model, its results and its logs in `output_dir`.

    Raises:
        UserError: anything the user can mend, before or during training.
    """
    for line in config.messages:
        say(line)
    select_device(config, say)
    model_config = read_model_config(config)
    tokenizer, template = open_tokenizer(config)
    check_vocabulary(model_config, tokenizer)
    output_dir = Path(config.basic.output_dir).expanduser()

    with open_output_folder(
        output_dir,
        resume_from_checkpoint=config.checkpoint.resume_from_checkpoint,
        overwrite_output_dir=config.basic.overwrite_output_dir,
        model_folder=model_folder(config),
        weights_from=first_weights(config),
        say=say,
    ) as start:
        callbacks = default_callbacks(
            output_dir,
            logging_dir=Path(config.basic.logging_dir).expanduser(),
            report_to=config.basic.report_to,
            disable_tqdm=config.basic.disable_tqdm,
        )
        dataset = training_dataset(config, tokenizer, template)
        plan = training_plan(config, dataset)
        say(str(dataset.report))
        say(plan.describe(config.training.max_steps, config.training.num_train_epochs))
        total_steps = count_steps(config, plan)
        held_out = evaluation_dataset(config, tokenizer, template) if evaluates(config) else None
        if held_out is not None:
            say(str(held_out.report))
        announce_dense_mask(config, plan, say)

        model = open_model(config, start.checkpoint or first_weights(config), say)
        parameters = named_weights(model)
        say(describe_decay(parameters, config.training.weight_decay))
        trainer = Trainer(
            model=model,
            parameters=parameters,
            optimizer=build_optimizer(parameters, optimizer_settings_from(config, model_config.num_hidden_layers)),
            schedule=schedule_from(config, total_steps),
            plan=plan,
            objective=objective_from(config),
            settings=settings_from(config, total_steps),
            identity=RunIdentity(
                seed=config.training.seed,
                data_fingerprint=dataset.fingerprint,
                batches={name: config[name] for name in BATCH_PARAMETERS} | {"plan_version": PLAN_VERSION},
                cpu_settings=cpu_settings(),
                versions=package_versions(),
            ),
            resolved_config=config.resolved(),
            write_model=lambda folder: _write_model(model, folder, tokenizer.files, config),
            evaluation_plan=None if held_out is None else evaluation_plan(config, held_out),
            callbacks=callbacks,
            read=lambda first, stop: prefetch(plan, first, config.acceleration.dataloader_num_workers, stop),
            describe_sample=dataset.location,
            describe_evaluation_sample=str if held_out is None else held_out.location,
            say=say,
        )
        return trainer.fit(start)


def evaluates(config: Config) -> bool:
    """Whether the run evaluates from time to time."""
    return config.basic.do_eval and config.evaluation.evaluation_strategy != "no"


def objective_from(config: Config) -> Objective:
    """The supervised loss with the head and the attention that the configuration asks for."""
    return supervised(
        fused_head=config.memory.use_fused_head_and_loss_fn,
        sparse_head=config.memory.use_sparse_head_and_loss_fn,
        dense_mask=uses_dense_mask(config),
    )


def first_weights(config: Config) -> Path | None:
    """Where a fresh run takes its weights from; None for random ones."""
    if config.checkpoint.init_from_checkpoint:
        return Path(config.checkpoint.init_from_checkpoint).expanduser()
    if not config.basic.continue_training:
        return None
    folder = model_folder(config)
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"model_name_or_path: {folder} holds no *.safetensors weights to continue from.\n"
            "  Put them there, or write continue_training: false to start from random weights."
        )
    return folder


def announce_dense_mask(config: Config, plan: StepPlan, say: Say) -> None:
    """Say how large the dense mask is before anything allocates it."""
    if uses_dense_mask(config):
        size = dense_mask_bytes(config.training.per_device_train_batch_size, config.training.max_seq_len)
        share = "" if math.isclose(size, 0) else f" of up to {size / 2**20:,.1f} MiB for each micro-batch"
        say(f"FlashMask is switched off: attention uses a dense mask{share}")


def _write_model(model, folder: Path, tokenizer_files, config: Config) -> None:  # type: ignore[no-untyped-def]
    limit = int(config.checkpoint.max_shard_size * 2**30)
    save_model_folder(model, folder, tokenizer_files, max_shard_bytes=limit)
