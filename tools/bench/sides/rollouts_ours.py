"""`erniekit train` of stage GRPO, a step whenever it is asked for; the words behind the script are its own."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from turns import Gate

from erniekit.cli import main
from erniekit.environment import import_paddle

import_paddle()

from erniekit.rollouts.steps import RolloutSteps
from erniekit.training.trainer import Trainer

gate = Gate()
read, finish = RolloutSteps.read, Trainer._finish_step
reward: list[float] = []


def read_when_asked(self: RolloutSteps, first: int, stop: int) -> Generator[Any, None, None]:
    steps = read(self, first, stop)
    for _ in range(first, stop):
        gate.wait()
        tokens, seconds = self.tokens, self.seconds
        batches = next(steps)
        gate.saw(self.tokens - tokens, sampling=self.seconds - seconds, answers=self.sizes.answers)
        assert self._rollout is not None
        reward.append(float(self._rollout.figures[:, 0].mean()))
        yield batches


def finished(self: Trainer, result: Any) -> None:
    finish(self, result)
    gate.passed(reward[-1])


RolloutSteps.read = read_when_asked  # type: ignore[method-assign]
Trainer._finish_step = finished  # type: ignore[method-assign]
main(["train", *sys.argv[1:]])
