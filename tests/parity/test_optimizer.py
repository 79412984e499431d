"""AdamW, clipping and the schedules against torch and transformers.

`python -m tests.parity.test_optimizer` records the reference values that `tests/training` compares with where torch is
not installed.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from erniekit.config.sections.training import TrainingParameters
from erniekit.training.optim.schedules import learning_rate
from tests.training.optimizer_case import (
    CASE,
    CASE_SCHEDULE,
    RECORDED_OPTIMIZER,
    RECORDED_SCHEDULES,
    SCHEDULES,
    STEPS,
    case_gradients,
    case_parameters,
    learning_rates,
    run_case,
)

pytestmark = pytest.mark.parity


def transformers_schedule(schedule: TrainingParameters) -> list[float]:
    """The learning rate of every step as transformers' scheduler sets it."""
    specific = {
        "cosine": {"min_lr": schedule.min_lr, "num_cycles": schedule.num_cycles},
        "polynomial": {"lr_end": schedule.lr_end, "power": schedule.power},
        "wsd": {
            "num_decay_steps": schedule.decay_steps,
            "decay_type": schedule.wsd_decay_type,
            "min_lr_ratio": schedule.min_lr / schedule.learning_rate,
        },
    }
    kind = schedule.lr_scheduler_type
    name = {"cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay"}.get(kind, kind)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=schedule.learning_rate)
    scheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=transformers.TrainingArguments.get_warmup_steps(schedule, schedule.max_steps),
        num_training_steps=schedule.max_steps,
        scheduler_specific_kwargs=specific.get(schedule.lr_scheduler_type),
    )
    rates = []
    for _ in range(schedule.max_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def torch_case() -> tuple[list[float], dict[str, np.ndarray]]:
    """The gradient norms and final parameters of `CASE` from torch's AdamW and clip_grad_norm_."""
    parameters = {name: torch.tensor(value, requires_grad=True) for name, value in case_parameters().items()}
    decaying = [value for value in parameters.values() if value.ndim > 1]
    plain = [value for value in parameters.values() if value.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": CASE.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(CASE.beta1, CASE.beta2),
        eps=CASE.epsilon,
    )
    norms = []
    for step, gradients in enumerate(case_gradients()):
        for name, value in parameters.items():
            value.grad = torch.tensor(gradients[name])
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), CASE.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, CASE_SCHEDULE, STEPS)
        optimizer.step()
    return norms, {name: value.detach().numpy() for name, value in parameters.items()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_transformers(name: str) -> None:
    schedule = SCHEDULES[name]
    np.testing.assert_allclose(learning_rates(schedule), transformers_schedule(schedule), rtol=1e-12, atol=1e-20)


def test_adamw_and_clipping_equal_torch() -> None:
    norms, parameters = torch_case()
    own_norms, own_parameters = run_case()
    np.testing.assert_allclose(own_norms, norms, rtol=1e-6)
    for name, value in parameters.items():
        np.testing.assert_allclose(own_parameters[name], value, rtol=2e-6, atol=2e-7, err_msg=name)


def test_recorded_values_are_those_of_this_torch() -> None:
    norms, parameters = torch_case()
    recorded = json.loads(RECORDED_OPTIMIZER.read_text())
    np.testing.assert_allclose(recorded["grad_norms"], norms, rtol=1e-6)
    for name, value in parameters.items():
        np.testing.assert_allclose(recorded["parameters"][name], value, rtol=1e-6, atol=1e-7)


def record() -> None:
    versions = {name: version(name) for name in ("torch", "transformers", "numpy")}
    norms, parameters = torch_case()
    stored = {name: value.tolist() for name, value in parameters.items()}
    _write(RECORDED_OPTIMIZER, {"versions": versions, "grad_norms": norms, "parameters": stored})
    rates = {name: transformers_schedule(schedule) for name, schedule in SCHEDULES.items()}
    _write(RECORDED_SCHEDULES, {"versions": versions, "learning_rates": rates})


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
