"""AdamW: the recorded values of torch, who decays, how fast each layer learns, and the state as named tensors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import CheckpointError
from erniekit.training.optim.adamw import (
    build_optimizer,
    describe_decay,
    layer_depth,
    layer_multiplier,
    load_optimizer_state,
    optimizer_state,
    stateless_optimizer,
)

from .fakes import FAKE_OBJECTIVE, FakeModel, FakePlan
from .optimizer_case import RECORDED_OPTIMIZER, run_case


def update(model: FakeModel, optimizer: paddle.optimizer.AdamW, step: int, rate: float = 0.01) -> None:
    FAKE_OBJECTIVE.loss(model, FakePlan().micro_batches(step)[0]).loss_sum.backward()
    optimizer.set_lr(rate)
    optimizer.step()
    optimizer.clear_grad()


def test_equal_to_torch() -> None:
    recorded = json.loads(RECORDED_OPTIMIZER.read_text())
    norms, parameters = run_case()
    np.testing.assert_allclose(norms, recorded["grad_norms"], rtol=1e-6)
    assert parameters.keys() == recorded["parameters"].keys()
    for name, value in parameters.items():
        np.testing.assert_allclose(value, recorded["parameters"][name], rtol=2e-6, atol=2e-7, err_msg=name)


def test_only_matrices_decay() -> None:
    model = FakeModel()
    optimizer = build_optimizer(model.named, TrainingParameters(weight_decay=0.5))
    before = {name: value.copy() for name, value in model.arrays().items()}
    for parameter in model.named.values():
        parameter.grad = paddle.zeros_like(parameter)  # no gradient: only decay moves a parameter
    optimizer.set_lr(0.1)
    optimizer.step()
    for name, value in model.arrays().items():
        factor = 1.0 if value.ndim == 1 else 1.0 - 0.1 * 0.5
        np.testing.assert_allclose(value, before[name] * factor, rtol=1e-6, err_msg=name)
    assert describe_decay(model.named, 0.5) == (
        "AdamW: weight decay 0.5 on 3 matrices (336 values); none on 2 norms and biases (16 values)"
    )


def test_frozen_parameters_are_left_out() -> None:
    model = FakeModel()
    model.named["lm_head.weight"].stop_gradient = True
    optimizer = build_optimizer(model.named, TrainingParameters(weight_decay=0.5))
    head = model.named["lm_head.weight"].numpy().copy()
    update(model, optimizer, 0)
    np.testing.assert_array_equal(model.named["lm_head.weight"].numpy(), head)
    assert not any(name.startswith("lm_head") for name in optimizer_state(optimizer, model.named))


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("model.embed_tokens.weight", 0),
        ("model.layers.0.self_attn.q_proj.weight", 1),
        ("model.layers.11.mlp.down_proj.weight", 12),
        ("model.norm.weight", 14),
        ("lm_head.weight", 14),
    ],
)
def test_depth_of_a_parameter(name: str, depth: int) -> None:
    assert layer_depth(name, num_layers=12) == depth


@given(bound=st.floats(0.01, 1.0), layers=st.integers(1, 80))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_layer_multipliers_rise_from_the_bound_to_one(bound: float, layers: int) -> None:
    multipliers = [layer_multiplier(depth, layers, bound) for depth in range(layers + 3)]
    assert multipliers[0] == pytest.approx(bound)
    assert multipliers[-1] == pytest.approx(1.0)
    assert multipliers == sorted(multipliers)


def test_layerwise_bound_scales_the_update_of_each_depth() -> None:
    moved = {}
    for bound in (1.0, 0.4):
        model = FakeModel()
        before = {name: value.copy() for name, value in model.arrays().items()}
        optimizer = build_optimizer(model.named, TrainingParameters(layerwise_lr_decay_bound=bound), num_layers=1)
        update(model, optimizer, 0)
        moved[bound] = {name: value - before[name] for name, value in model.arrays().items()}
    for name in moved[1.0]:
        factor = {"model.embed_tokens.weight": 0.4}.get(name, 0.6 if "layers.0" in name else 1.0)
        np.testing.assert_allclose(moved[0.4][name], factor * moved[1.0][name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_state_goes_to_another_optimizer_bit_for_bit() -> None:
    first, second = FakeModel(), FakeModel()
    one = build_optimizer(first.named, TrainingParameters(weight_decay=0.1))
    for step in range(3):
        update(first, one, step)
    state = {name: tensor.numpy().copy() for name, tensor in optimizer_state(one, first.named).items()}
    assert "model.norm.weight/moment1" in state
    assert state["model.norm.weight/beta2_pow_acc"].shape == (1,)

    two = build_optimizer(second.named, TrainingParameters(weight_decay=0.1))
    load_optimizer_state(two, second.named, state, state.__getitem__)
    for name, tensor in second.named.items():
        tensor.set_value(first.named[name].numpy())
    for step in range(3, 6):
        update(first, one, step)
        update(second, two, step)
    for name, value in first.arrays().items():
        np.testing.assert_array_equal(value, second.arrays()[name], err_msg=name)


def test_state_of_other_parameters_is_refused() -> None:
    model = FakeModel()
    optimizer = build_optimizer(model.named, TrainingParameters())
    state = {name: tensor.numpy() for name, tensor in optimizer_state(optimizer, model.named).items()}
    missing = {name: value for name, value in state.items() if name != "lm_head.weight/moment1"}
    with pytest.raises(CheckpointError, match=r"1 missing.*lm_head.weight/moment1.*0 unknown"):
        load_optimizer_state(optimizer, model.named, missing, missing.__getitem__)
    transposed = state | {"lm_head.weight/moment1": state["lm_head.weight/moment1"].T}
    with pytest.raises(CheckpointError, match=r"lm_head.weight/moment1: expected shape \[8, 17\], got \[17, 8\]"):
        load_optimizer_state(optimizer, model.named, transposed, transposed.__getitem__)


@pytest.mark.proves("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "layerwise_lr_decay_bound")
def test_what_adamw_is_made_with() -> None:
    section = TrainingParameters(
        adam_beta1=0.5, adam_beta2=0.6, adam_epsilon=0.25, weight_decay=0.125, layerwise_lr_decay_bound=0.5
    )
    made: dict[str, Any] = {}
    stateless_optimizer(FakeModel().named, section, lambda **named: made.update(named), num_layers=1)  # type: ignore[arg-type, func-returns-value]
    assert [made[name] for name in ("beta1", "beta2", "epsilon", "weight_decay")] == [0.5, 0.6, 0.25, 0.125]
    assert min(parameter.optimize_attr["learning_rate"] for parameter in made["parameters"]) < 1
