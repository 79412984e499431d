"""One small optimisation problem and a set of schedules, run by torch (tests/parity) and by us on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.training import TrainingParameters
from erniekit.training.gradients import clip_by_norm, global_norm
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.optim.schedules import learning_rate

RECORDED = Path(__file__).parent / "recorded"
RECORDED_SCHEDULES, RECORDED_OPTIMIZER = RECORDED / "schedules.json", RECORDED / "adamw.json"
STEPS = 20


class CASE:
    weight_decay, beta1, beta2, epsilon, max_grad_norm = 0.1, 0.9, 0.95, 1e-8, 2.0


def schedule(kind: str, learning_rate: float, max_steps: int, **parameters: Any) -> TrainingParameters:
    return TrainingParameters(lr_scheduler_type=kind, learning_rate=learning_rate, max_steps=max_steps, **parameters)


def learning_rates(section: TrainingParameters) -> list[float]:
    """Of every step of a run of `max_steps`."""
    return [learning_rate(step, section, section.max_steps) for step in range(section.max_steps)]


CASE_SCHEDULE = schedule("cosine", 0.05, STEPS, warmup_steps=3, min_lr=0.005)


SCHEDULES = {
    "linear": schedule("linear", 1e-3, 30, warmup_steps=5),
    "linear, no warm-up": schedule("linear", 1e-3, 30),
    "cosine": schedule("cosine", 3e-4, 30, warmup_steps=4, min_lr=3e-5),
    "cosine, waves": schedule("cosine", 3e-4, 30, warmup_steps=4, num_cycles=1.5),
    "polynomial": schedule("polynomial", 1e-3, 30, warmup_steps=5, lr_end=1e-5, power=2.0),
    "constant": schedule("constant", 1e-3, 10),
    "constant_with_warmup": schedule("constant_with_warmup", 1e-3, 10, warmup_steps=4),
    "inverse_sqrt": schedule("inverse_sqrt", 1e-3, 30, warmup_steps=5),
    "inverse_sqrt, no warm-up": schedule("inverse_sqrt", 1e-3, 30),
    "cosine, a share": schedule("cosine", 3e-4, 30, warmup_ratio=0.11),
    "wsd linear": schedule("wsd", 1e-3, 30, warmup_steps=5, decay_steps=10, min_lr=1e-4),
    "wsd cosine": schedule("wsd", 1e-3, 30, warmup_steps=5, decay_steps=10, wsd_decay_type="cosine"),
    "wsd 1-sqrt": schedule("wsd", 1e-3, 30, warmup_steps=5, decay_steps=10, wsd_decay_type="1-sqrt"),
}


def case_parameters() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(11)
    shapes = {"model.layers.0.mlp.weight": (4, 3), "model.layers.0.mlp.bias": (3,), "model.norm.weight": (4,)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def case_gradients() -> Iterator[dict[str, np.ndarray]]:
    """The gradients of each step: some above the norm that is clipped to, some below."""
    generator = np.random.default_rng(12)
    for step in range(STEPS):
        scale = 0.2 if step % 3 == 0 else 1.5
        yield {
            name: (scale * generator.standard_normal(value.shape)).astype(np.float32)
            for name, value in case_parameters().items()
        }


def run_case() -> tuple[list[float], dict[str, np.ndarray]]:
    """Gradient norms and final parameters from our optimizer."""
    layer = paddle.nn.Layer()
    parameters = {}
    for name, value in case_parameters().items():
        parameters[name] = layer.create_parameter(list(value.shape))
        parameters[name].set_value(value)
    settings = TrainingParameters(
        weight_decay=CASE.weight_decay, adam_beta1=CASE.beta1, adam_beta2=CASE.beta2, adam_epsilon=CASE.epsilon
    )
    optimizer = build_optimizer(parameters, settings)
    norms = []
    for step, gradients in enumerate(case_gradients()):
        for name, parameter in parameters.items():
            parameter.grad = paddle.to_tensor(gradients[name])
        norms.append(float(global_norm(parameters.values())))
        clip_by_norm(parameters.values(), norms[-1], CASE.max_grad_norm)
        optimizer.set_lr(learning_rate(step, CASE_SCHEDULE, STEPS))
        optimizer.step()
    return norms, {name: parameter.numpy() for name, parameter in parameters.items()}
