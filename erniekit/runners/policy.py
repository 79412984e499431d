"""What a run of stage GRPO is made of: prompts, rewards, the reference, the objective, the steps that it samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from erniekit.build.checks import check_groups
from erniekit.build.data import DataParallelRank, dp_rank_of, evaluates
from erniekit.build.model import head_settings
from erniekit.build.precision import forward_precision
from erniekit.build.reference import disabled_adapters_reference, frozen_copy_reference
from erniekit.build.tokenizer import speech_of
from erniekit.config import Config
from erniekit.config.sections.dpo import reference_mode
from erniekit.data.templates.ernie import Template
from erniekit.data.templates.speech import UnitText
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.distributed.mesh import Mesh
from erniekit.model.decoder import Decoder
from erniekit.rewards.rewards import Rewards, open_rewards
from erniekit.rollouts.evaluation import RewardEvaluation
from erniekit.rollouts.prompts import PromptDataset, PromptPlan, evaluation_prompts, training_prompts
from erniekit.rollouts.records import RolloutRecords
from erniekit.rollouts.rollout import Sizes, figure_names
from erniekit.rollouts.sampling import Texts, sampling_settings
from erniekit.rollouts.steps import RolloutSteps, with_reference_state, without_rollout
from erniekit.rollouts.workers import RolloutWorkers
from erniekit.training.callbacks.files import SAMPLES_FILE
from erniekit.training.checkpoint.state import load_extra_state, load_state
from erniekit.training.checkpoint.tensors import NO_TENSORS
from erniekit.training.collectives import Ranks
from erniekit.training.evaluation import EvaluationResult
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.policy import (
    RATIO_TOLERANCE,
    RATIO_TOLERANCE_16_BITS,
    PolicySettings,
    answer_token_logps,
    measure_logps,
    policy,
)
from erniekit.training.objectives.policy_losses import Clip
from erniekit.training.objectives.reference import Reference
from erniekit.training.optim.schedules import check_schedule_fits

logger = logging.getLogger(__name__)


class Prompts(NamedTuple):
    """The prompts of a run that this rank has read; every rank reads all of them."""

    training: PromptDataset
    evaluation: PromptDataset | None


@dataclass(frozen=True)
class PolicyData:
    """The plan of the prompts that a run takes.

    Attributes:
        total_steps: the number of optimizer steps of the run.
        dp_rank: the data-parallel rank, which determines this rank's share of the answers.
    """

    plan: PromptPlan
    total_steps: int
    dp_rank: DataParallelRank
    sizes: Sizes
    held_out: PromptDataset | None


class RunParts(NamedTuple):
    """What the trainer gets.

    Attributes:
        read_steps: the micro-batches of steps, see `Trainer.read_steps`.
        run_evaluation: on held-out prompts; None where there are none.
        close: ends what samples and scores answers.
    """

    objective: Objective
    read_steps: Callable[[int, int], Generator[Sequence[Any], None, None]]
    run_evaluation: Callable[[], EvaluationResult] | None
    close: Callable[[], None] = lambda: None


def read_prompts(config: Config, tokenizer: Tokenizer, template: Template) -> Prompts:
    """Read the prompts of a run. Raises DataError."""
    held_out = evaluation_prompts(config, tokenizer, template) if evaluates(config) else None
    return Prompts(training_prompts(config, tokenizer, template), held_out)


def plan_prompts(config: Config, prompts: Prompts, mesh: Mesh) -> PolicyData:
    """Plan the steps of a run.

    Raises:
        ConfigurationError: the answers of a rollout are no whole groups, or the learning-rate schedule does not fit.
    """
    dp_rank = dp_rank_of(config, mesh)
    plan = PromptPlan(config, prompts.training)
    sizes, total_steps = sizes_and_steps(config, plan, dp_rank.dp_world_size)
    logger.info(str(prompts.training.report))
    logger.info(f"a rollout: {sizes.prompts:,} prompts x {sizes.group:,} answers, for {sizes.steps:,} optimizer steps")
    if prompts.evaluation is not None:
        logger.info(f"evaluation: {prompts.evaluation.report}")
    return PolicyData(plan, total_steps, dp_rank, sizes, prompts.evaluation)


def sizes_and_steps(config: Config, plan: PromptPlan, dp_world_size: int) -> tuple[Sizes, int]:
    """Return how many answers a run samples at once, and the steps that it makes. Raises as `plan_prompts`."""
    section, training = config.grpo, config.training
    check_groups(config, dp_world_size)
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps * dp_world_size
    sizes = Sizes(batch, section.steps_per_generation, section.num_iterations, section.num_generations)
    total_steps = plan.total_steps(config, sizes.prompts, sizes.steps)
    check_schedule_fits(training, total_steps)
    return sizes, total_steps


def policy_run(
    config: Config,
    model: Decoder,
    data: PolicyData,
    tokenizer: Tokenizer,
    template: Template,
    checkpoint: Path | None,
    ranks: Ranks,
    mesh: Mesh,
) -> RunParts:
    """Build what a run samples, scores and minimises, where `checkpoint` left it.

    Raises:
        UserError: a reward or the reference cannot be opened, or the checkpoint does not fit.
    """
    section, dpo, heads = config.grpo, config.dpo, head_settings(config)
    saved = load_extra_state(checkpoint, ranks) if checkpoint else NO_TENSORS
    rewards = open_rewards(config, scores=ranks.is_main_process)
    measure = measure_logps(answer_token_logps(section.rollout_temperature, **heads), ranks)
    reference: Reference | None = None
    mode = reference_mode(dpo, lora=config.lora.lora)
    if mode == "adapters":
        reference = disabled_adapters_reference(
            config, model, without_rollout(saved), ranks, fresh=checkpoint is None, measure=measure
        )
    elif mode == "copy":
        reference = frozen_copy_reference(config, model, without_rollout(saved), ranks, mesh, measure=measure)
    rank: dict[str, Any] = {name: getattr(data.dp_rank, name) for name in ("dp_rank", "dp_world_size", "multiple_of")}
    texts = texts_of(config, tokenizer, template)
    records = RolloutRecords(config.output_dir, writes=ranks.is_main_process)
    workers = None
    if section.rollout_workers and ranks.is_main_process:
        workers = RolloutWorkers(config, sampling_settings(config, texts))
    rank |= {"workers": workers, "row_length": config.training.max_seq_len if config.acceleration.packing else 0}
    steps = RolloutSteps(
        config, model, data.plan, data.sizes, rewards, texts, measure, reference, records, ranks, **rank
    )
    if checkpoint is not None:
        steps.restore(saved, load_state(checkpoint).step)
    objective = policy(
        PolicySettings(
            loss_type=dpo.loss_type,
            clip=Clip(section.clip_ratio_low, section.clip_ratio_high, section.clip_ratio_max),
            longest=section.max_completion_len,
            sequence_level=section.importance_sampling_level == "sequence",
            temperature=section.rollout_temperature,
            beta=dpo.beta,
            kl_estimator=section.kl_estimator,
            figures=figure_names(rewards.names, dynamic=section.dynamic_sampling),
            tolerance=RATIO_TOLERANCE_16_BITS if forward_precision(config) else RATIO_TOLERANCE,
        ),
        is_first_update=steps.is_first_update,
        **heads,
    )

    def after_update(step: int) -> None:
        if reference is not None and dpo.ref_model_update_steps > 0 and step % dpo.ref_model_update_steps == 0:
            reference.update()

    objective = replace(objective, extra_state=with_reference_state(steps, reference), after_update=after_update)
    evaluation = None
    if data.held_out is not None:
        evaluation = partial(reward_evaluation(config, data.held_out, rewards, texts, ranks, data.dp_rank), model)

    def close() -> None:
        rewards.close()
        if workers is not None:
            workers.close()

    return RunParts(objective, steps.read, evaluation, close)


def texts_of(config: Config, tokenizer: Tokenizer, template: Template) -> Texts:
    """Return what makes text of the tokens of answers."""
    decode = UnitText(tokenizer, speech_of(config).unit_token).decode
    return Texts(decode, template.stop_token_ids, tokenizer.pad_id)


def reward_evaluation(
    config: Config,
    held_out: PromptDataset,
    rewards: Rewards,
    texts: Texts,
    ranks: Ranks,
    dp_rank: DataParallelRank,
) -> RewardEvaluation:
    """Build what lets a model answer held-out prompts, and scores the answers."""
    samples = config.output_dir / SAMPLES_FILE if ranks.is_main_process else Path(os.devnull)
    return RewardEvaluation(
        held_out,
        rewards,
        texts,
        config.grpo.max_completion_len,
        samples,
        ranks,
        dp_rank.dp_rank,
        dp_rank.dp_world_size,
    )
