"""Build the objectives of a run from its configuration: the losses and the references of preference losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import paddle

from erniekit.build.data import RunData
from erniekit.build.model import head_settings
from erniekit.build.reference import (
    PairBatches,
    disabled_adapters_reference,
    evaluation_reference,
    frozen_copy_reference,
    log_prob_fn,
    precomputed_references,
)
from erniekit.build.teacher import open_teacher
from erniekit.build.teacher_table import table_teachers
from erniekit.config import Config
from erniekit.config.sections.dpo import reference_mode
from erniekit.data.batch import Batch
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.topology import topology_from
from erniekit.model.architectures.speaking import code_layout, codebook_weights
from erniekit.model.decoder import Decoder
from erniekit.model.divergence import Divergence
from erniekit.training.checkpoint.state import load_extra_state, load_state
from erniekit.training.checkpoint.tensors import NO_TENSORS
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.codes import ar_nar_codes, masked_codes
from erniekit.training.objectives.distillation import Teacher, distillation, model_teacher
from erniekit.training.objectives.objective import Objective, supervised
from erniekit.training.objectives.preference import preference
from erniekit.training.objectives.reference import (
    EVALUATION,
    TRAINING,
    PrecomputedReference,
    Reference,
    precompute_missing_logps,
)
from erniekit.training.objectives.reward_model import reward_model
from erniekit.training.objectives.verdicts import verdicts

logger = logging.getLogger(__name__)


def supervised_objective(config: Config) -> Objective:
    """Build the loss of next tokens with the head and the attention that the configuration asks for."""
    return supervised(**head_settings(config), multi_token_pred_lambda=config.moe.multi_token_pred_lambda)


def preference_objective(config: Config, reference: Reference | None) -> Objective:
    """Build the loss over pairs that section 2.3 describes."""
    return preference(config.dpo, reference, **head_settings(config))


def verdict_objective(config: Config, reference: Reference | None) -> Objective:
    """Build the loss over answers with a verdict that section 2.9 describes."""
    topology = topology_from(config)
    slices = topology.tensor if topology.sequence_parallel else 1  # of the tokens of a micro-batch
    return verdicts(config.kto, config.dpo.beta, reference, multiple_of=slices, **head_settings(config))


ComparingObjective = Callable[[Config, Reference | None], Objective]  # one of the two above


def preference_objectives(
    make: ComparingObjective,
    config: Config,
    model: Decoder,
    data: RunData,
    checkpoint: Path | None,
    ranks: Ranks = SINGLE_PROCESS,
    mesh: Mesh = SINGLE_PROCESS_MESH,
) -> tuple[Objective, Objective]:
    """Build the losses of training and of evaluation in a run that trains `model`, with their reference.

    The reference is the model that the run starts from, also where it resumes, or `ref_model_name_or_path`.

    Args:
        make: builds a loss from its reference.
        checkpoint: the checkpoint that the run resumes from, whose weights `model` has.
        ranks, mesh: the ranks of the run.

    Raises:
        ModelFileError: the folder of the reference is not valid.
    """
    mode, fresh = reference_mode(config.dpo, lora=config.lora.lora), checkpoint is None
    saved = load_extra_state(checkpoint, ranks) if checkpoint else NO_TENSORS
    if mode == "none":
        return make(config, None), make(config, None)
    if mode == "precomputed":
        pairs = _pairs_of_run(config, data, load_state(checkpoint).step if checkpoint else 0)
        tables = precomputed_references(config, model, pairs, saved, ranks, mesh, fresh=fresh)
        objective = replace(
            make(config, tables[TRAINING]),
            extra_state=lambda: {name: paddle.to_tensor(item.table) for name, item in tables.items()},
        )
        return objective, make(config, tables.get(EVALUATION))
    reference: Reference
    if mode == "adapters":
        reference = disabled_adapters_reference(config, model, saved, ranks, fresh=fresh)
    else:
        reference = frozen_copy_reference(config, model, saved, ranks, mesh)

    def after_update(step: int) -> None:
        every = config.dpo.ref_model_update_steps
        if every > 0 and step % every == 0:
            reference.update()

    objective = replace(make(config, reference), extra_state=reference.tensors, after_update=after_update)
    return objective, objective


def _pairs_of_run(config: Config, data: RunData, first_step: int) -> dict[str, PairBatches]:
    def training_batches() -> Iterator[Batch]:
        return chain.from_iterable(data.plan.micro_batches(step) for step in range(first_step, data.total_steps))

    pairs = {TRAINING: PairBatches(data.plan.dataset, training_batches)}
    if (plan := data.evaluation_plan) is not None:
        available, limit = plan.steps_in_epoch(0), config.evaluation.max_evaluate_steps
        stop = min(limit, available) if limit > 0 else available
        pairs[EVALUATION] = PairBatches(plan.dataset, lambda: (batch for _, batch in plan.local_steps(stop)))
    return pairs


def preference_evaluation_objective(
    make: ComparingObjective,
    config: Config,
    model: Decoder,
    ranks: Ranks = SINGLE_PROCESS,
    mesh: Mesh = SINGLE_PROCESS_MESH,
) -> Objective:
    """Build the loss of an evaluation without training; see `evaluation_reference`."""
    return make(config, evaluation_reference(config, model, ranks, mesh))


def preference_objective_of_batch(make: ComparingObjective, config: Config, model: Decoder, batch: Batch) -> Objective:
    """Build the loss of one batch, whose reference is `model` as it is now; nothing is kept on disk."""
    table = np.full((1 + max(sample for row in batch.samples for sample in row), 2), np.nan, np.float32)
    precompute_missing_logps(table, [batch], model, log_prob_fn(config))
    return make(config, PrecomputedReference(table))


def reward_objective(config: Config) -> Objective:
    """Build the loss over scores that section 2.10 describes."""
    return reward_model(config.reward_model, dense_mask=head_settings(config)["dense_mask"])


def distillation_objective(config: Config, teacher: Teacher) -> Objective:
    """Build the divergence from a teacher that section 2.11 describes."""
    section = config.distillation
    divergence = Divergence(section.distill_divergence, section.jsd_beta, section.distill_temperature)
    return distillation(teacher, divergence, section.distill_sft_share, dense_mask=config.uses_dense_mask)


def distillation_objective_of_run(config: Config, mesh: Mesh = SINGLE_PROCESS_MESH) -> Objective:
    """Build the same with the teacher in the memory of each process.

    Raises:
        ModelFileError: the folder of the teacher is not valid, or its vocabulary is another.
    """
    teacher = model_teacher(open_teacher(config, mesh), dense_mask=config.uses_dense_mask)
    return distillation_objective(config, teacher)


def distillation_objectives(
    config: Config, model: Decoder, data: RunData, ranks: Ranks, mesh: Mesh
) -> tuple[Objective, Objective]:
    """Build the divergences of training and of its evaluations, with the teacher in memory or its likeliest tokens on
    disk.

    Raises:
        UserError: the teacher or a table of its tokens is not what the run needs.
    """
    if not config.distillation.teacher_top_k:
        objective = distillation_objective_of_run(config, mesh)
        return objective, objective
    datasets = {"training": (data.plan.dataset, data.dp_rank)}
    if data.evaluation_plan is not None:
        datasets["evaluation"] = (data.evaluation_plan.dataset, data.dp_rank)
    teachers = table_teachers(config, datasets, model.head.tp, ranks, mesh)
    objectives = {name: distillation_objective(config, teacher) for name, teacher in teachers.items()}
    return objectives["training"], objectives.get("evaluation", objectives["training"])


def speech_objective(config: Config, model: Decoder) -> Objective:
    """Build the loss of codes that section 2.8 describes, and log it."""
    section, head = config.speech, head_settings(config)
    chosen, settings = section.audio_codebook_weights, {name: head[name] for name in ("fused_head", "dense_mask")}
    if section.tts_objective == "masked":
        weights = np.array(chosen or codebook_weights(model.config))
        logger.info(f"objective: masked codes, weights {_numbers(weights / weights.sum())}")
        return masked_codes(weights.tolist(), **settings)
    factors = chosen or (1.0,) * code_layout(model.config).levels
    text, prompt, response = section.loss_factors
    logger.info(
        f"objective: AR and NAR codes, loss factors {text:g} (text), {prompt:g} (prompt), {response:g} (response; its "
        f"levels {_numbers(factors)})"
    )
    return ar_nar_codes(factors, (text, prompt, response), **settings)


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{value:.2g}" for value in values)


def freeze_mtp(model: Decoder) -> None:
    """Freeze multi-token prediction layers, which the loss does not train; weight decay would shrink them."""
    if model.mtp:
        for parameter in model.mtp.parameters():
            parameter.stop_gradient = True
        logger.info("multi-token prediction layers are frozen: the loss of this stage does not train them")
