"""One small optimisation problem and a set of schedules, run by torch (tests/parity) and by us on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paddle

from erniekit.training.gradients import clip_by_norm, global_norm
from erniekit.training.optim.adamw import OptimizerSettings, build_optimizer
from erniekit.training.optim.schedules import Schedule, learning_rate

RECORDED = Path(__file__).parent / "recorded"
RECORDED_SCHEDULES, RECORDED_OPTIMIZER = RECORDED / "schedules.json", RECORDED / "adamw.json"
STEPS = 20


class CASE:
    weight_decay, beta1, beta2, epsilon, max_grad_norm = 0.1, 0.9, 0.95, 1e-8, 2.0


def case_schedule() -> Schedule:
    return Schedule("cosine", peak_lr=0.05, total_steps=STEPS, warmup_steps=3, min_lr=0.005)


SCHEDULES = {
    "linear": Schedule("linear", peak_lr=1e-3, total_steps=30, warmup_steps=5),
    "linear, no warm-up": Schedule("linear", peak_lr=1e-3, total_steps=30),
    "cosine": Schedule("cosine", peak_lr=3e-4, total_steps=30, warmup_steps=4, min_lr=3e-5),
    "cosine, waves": Schedule("cosine", peak_lr=3e-4, total_steps=30, warmup_steps=4, num_cycles=1.5),
    "polynomial": Schedule("polynomial", peak_lr=1e-3, total_steps=30, warmup_steps=5, lr_end=1e-5, power=2.0),
    "constant": Schedule("constant", peak_lr=1e-3, total_steps=10),
    "constant_with_warmup": Schedule("constant_with_warmup", peak_lr=1e-3, total_steps=10, warmup_steps=4),
    "wsd linear": Schedule("wsd", peak_lr=1e-3, total_steps=30, warmup_steps=5, decay_steps=10, min_lr=1e-4),
    "wsd cosine": Schedule("wsd", peak_lr=1e-3, total_steps=30, warmup_steps=5, decay_steps=10, decay_shape="cosine"),
    "wsd 1-sqrt": Schedule("wsd", peak_lr=1e-3, total_steps=30, warmup_steps=5, decay_steps=10, decay_shape="1-sqrt"),
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
    settings = OptimizerSettings(
        weight_decay=CASE.weight_decay, beta1=CASE.beta1, beta2=CASE.beta2, epsilon=CASE.epsilon
    )
    optimizer = build_optimizer(parameters, settings)
    norms = []
    for step, gradients in enumerate(case_gradients()):
        for name, parameter in parameters.items():
            parameter.grad = paddle.to_tensor(gradients[name])
        norms.append(float(global_norm(parameters.values())))
        clip_by_norm(parameters.values(), norms[-1], CASE.max_grad_norm)
        optimizer.set_lr(learning_rate(step, case_schedule()))
        optimizer.step()
    return norms, {name: parameter.numpy() for name, parameter in parameters.items()}
