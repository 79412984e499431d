"""Ranks that train on different data, and what befalls one of them."""

from __future__ import annotations

import os
import signal
from typing import Any

import paddle.distributed as dist

from erniekit.config import Config
from erniekit.errors import TrainingError
from erniekit.runners.evaluate import run_evaluation
from erniekit.runners.train import run_training
from erniekit.training import trainer
from erniekit.training.step import StepResult
from tests.log_capture import captured_log


def train(parameters: dict[str, Any], of_rank_1: dict[str, Any]) -> dict[str, Any]:
    """Train, on rank 1 with other parameters; how it ended, what was said, the losses."""
    rank = dist.ParallelEnv().rank
    config = Config.from_mapping(parameters | (of_rank_1 if rank == 1 else {}), verb="train")
    try:
        with captured_log() as said:
            result = run_training(config)
    except TrainingError as error:
        return {"error": str(error)}
    return {"step": result.step, "best": result.best.step, "stopped by": result.stopped_by, "said": said}


def evaluate(parameters: dict[str, Any]) -> dict[str, Any]:
    """Evaluate; the figures that this rank has."""
    result = run_evaluation(Config.from_mapping(parameters, verb="train"))
    return {name: value for name, value in result.results().items() if "second" not in name}


def train_and_get_a_signal(parameters: dict[str, Any], step: int) -> dict[str, Any]:
    """Rank 1 is told to stop in the middle of a step."""
    _in_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return train(parameters, {})


def train_and_overflow(parameters: dict[str, Any], step: int) -> dict[str, Any]:
    """On rank 1 the weights of the final norm are infinite in one step."""
    from erniekit.runners import train as runner

    opened = runner.open_model
    models: list[Any] = []

    def open_model(*arguments: Any, **more: Any) -> Any:
        models.append(opened(*arguments, **more))
        return models[0]

    runner.open_model = open_model  # type: ignore[assignment]
    _in_step(step, lambda: models[0].norm.weight.set_value(models[0].norm.weight * float("inf")))
    return train(parameters, {})


def _in_step(number: int, happens: Any) -> None:
    """Let something happen on rank 1 when it begins a step."""
    original = trainer.train_step

    def train_step(*arguments: Any, step: int, **more: Any) -> StepResult:
        if step == number and dist.ParallelEnv().rank == 1:
            happens()
        return original(*arguments, step=step, **more)

    trainer.train_step = train_step  # type: ignore[assignment]
