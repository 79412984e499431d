"""What each stage minimises: how its objectives are built, and how the model is prepared for them.

`erniekit.config.stages` declares what a stage reads, reports and refuses, and says how a stage is added. This half
needs Paddle: a new stage names here the functions of `erniekit.build.objectives` that build its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from erniekit.build.data import RunData
from erniekit.build.objectives import (
    ComparingObjective,
    distillation_objective_of_run,
    distillation_objectives,
    freeze_mtp,
    preference_evaluation_objective,
    preference_objective,
    preference_objective_of_batch,
    preference_objectives,
    reward_objective,
    speech_objective,
    supervised_objective,
    verdict_objective,
)
from erniekit.config import Config
from erniekit.config.stages import STAGES as DECLARED
from erniekit.data.batch import Batch
from erniekit.distributed.mesh import Mesh
from erniekit.model.decoder import Decoder
from erniekit.training.collectives import Ranks
from erniekit.training.objectives.objective import Objective


@dataclass(frozen=True)
class StageObjectives:
    """How a stage builds its objectives.

    Attributes:
        training: builds the objectives of training and of its evaluations, from the model, the data of the run and the
            checkpoint that it resumes from.
        evaluation: builds the objective of an evaluation without training.
        single_batch: builds the objective of one batch on one process, for the check of a configuration.
        prepare_model: changes what is trained of the model, before the optimizer is made.
    """

    training: Callable[[Config, Decoder, RunData, Path | None, Ranks, Mesh], tuple[Objective, Objective]]
    evaluation: Callable[[Config, Decoder, Ranks, Mesh], Objective]
    single_batch: Callable[[Config, Decoder, Batch], Objective]
    prepare_model: Callable[[Decoder], None] = lambda model: None


def _supervised_objectives(
    config: Config, model: Decoder, data: RunData, checkpoint: Path | None, ranks: Ranks, mesh: Mesh
) -> tuple[Objective, Objective]:
    objective = supervised_objective(config)
    return objective, objective


SUPERVISED = StageObjectives(
    training=_supervised_objectives,
    evaluation=lambda config, model, ranks, mesh: supervised_objective(config),
    single_batch=lambda config, model, batch: supervised_objective(config),
)


def _compared(make: ComparingObjective) -> StageObjectives:
    """Return how a stage builds its objectives whose loss compares the model with a reference."""
    return StageObjectives(
        training=partial(preference_objectives, make),
        evaluation=partial(preference_evaluation_objective, make),
        single_batch=partial(preference_objective_of_batch, make),
        prepare_model=freeze_mtp,
    )


def _speech_objectives(
    config: Config, model: Decoder, data: RunData, checkpoint: Path | None, ranks: Ranks, mesh: Mesh
) -> tuple[Objective, Objective]:
    objective = speech_objective(config, model)
    return objective, objective


SPEECH = StageObjectives(
    training=_speech_objectives,
    evaluation=lambda config, model, ranks, mesh: speech_objective(config, model),
    single_batch=lambda config, model, batch: speech_objective(config, model),
)


def _reward_objectives(
    config: Config, model: Decoder, data: RunData, checkpoint: Path | None, ranks: Ranks, mesh: Mesh
) -> tuple[Objective, Objective]:
    objective = reward_objective(config)
    return objective, objective


REWARD = StageObjectives(
    training=_reward_objectives,
    evaluation=lambda config, model, ranks, mesh: reward_objective(config),
    single_batch=lambda config, model, batch: reward_objective(config),
)


def _distillation_objectives(
    config: Config, model: Decoder, data: RunData, checkpoint: Path | None, ranks: Ranks, mesh: Mesh
) -> tuple[Objective, Objective]:
    return distillation_objectives(config, model, data, ranks, mesh)


DISTILLATION = StageObjectives(
    training=_distillation_objectives,
    evaluation=lambda config, model, ranks, mesh: distillation_objective_of_run(config, mesh),
    single_batch=lambda config, model, batch: distillation_objective_of_run(config),
    prepare_model=freeze_mtp,
)
STAGES: Mapping[str, StageObjectives] = {
    "PT": SUPERVISED,
    "SFT": SUPERVISED,
    "DPO": _compared(preference_objective),
    "KTO": _compared(verdict_objective),
    "RM": REWARD,
    "TTS": SPEECH,
    "DISTILL": DISTILLATION,
}
# What a stage is made of whose samples are answers of the model: `runners/policy.py`.
assert STAGES.keys() == {name for name, stage in DECLARED.items() if not stage.reads_prompts}


def stage_objectives(config: Config) -> StageObjectives:
    """Return how the stage of a configuration builds its objectives."""
    return STAGES[config.stage.name]


def prepare_model(config: Config, model: Decoder) -> None:
    """Change what is trained of the model, before the optimizer is made."""
    (freeze_mtp if config.stage.reads_prompts else stage_objectives(config).prepare_model)(model)
