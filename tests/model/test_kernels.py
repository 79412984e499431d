"""Fused kernels: what is given to them, and that ours run where there are none."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import kernels
from erniekit.model.architectures.rope_scaling import rotary_frequencies
from erniekit.model.kernels import FusedKernels, use_fused_kernels
from erniekit.model.linear import Linear
from erniekit.model.mlp import swiglu
from erniekit.model.norm import rms_norm
from erniekit.model.rope import apply_rotary, rotary_tables

from .tiny import logits_of, tiny_config, tiny_model

ALL = FusedKernels(rope=True, linear=True, rms_norm=True, swiglu=True)


@pytest.fixture
def chosen(monkeypatch):
    """All of them, whatever the device."""
    monkeypatch.setattr(kernels, "_chosen", ALL)


def values(*shape, seed=0):
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return paddle.to_tensor(array, stop_gradient=False)


def gradients(function, *tensors):
    for tensor in tensors:
        tensor.clear_gradient(False)
    out = function(*tensors)
    (out * values(*out.shape, seed=9).detach()).sum().backward()
    return [out.numpy(), *(tensor.grad.numpy() for tensor in tensors)]


def test_a_cpu_has_only_that_of_swiglu(monkeypatch):
    monkeypatch.setattr(kernels, "_chosen", FusedKernels())
    on_cpu = FusedKernels(swiglu=True)
    assert use_fused_kernels(ALL) == (ALL if paddle.get_device().startswith("gpu") else on_cpu)
    assert use_fused_kernels(FusedKernels(rope=True)) == FusedKernels() or paddle.get_device().startswith("gpu")
    assert str(ALL) == "rope, linear, rms_norm, swiglu"


def test_swiglu_is_paddles_own(monkeypatch):
    """Its kernel exists on a CPU, too."""
    gate, up = values(5, 8), values(5, 8, seed=1)
    plain = gradients(swiglu, gate, up)
    monkeypatch.setattr(kernels, "_chosen", ALL)
    for ours, theirs in zip(plain, gradients(swiglu, gate, up), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotation_gets_angles_and_pairs_as_the_kernel_reads_them(interleaved, chosen, monkeypatch):
    """The stand-in follows Paddle's description of its kernel, element by element."""

    def kernel(q, k=None, v=None, *, sin, cos, use_neox_rotary_style):
        q, sin, cos = q.numpy(), sin.numpy()[0, :, 0], cos.numpy()[0, :, 0]
        out, half = np.zeros_like(q), q.shape[-1] // 2
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if use_neox_rotary_style else (pair, pair + half)
            out[..., a] = q[..., a] * cos[:, a, None] - q[..., b] * sin[:, a, None]
            out[..., b] = q[..., b] * cos[:, b, None] + q[..., a] * sin[:, b, None]
        return paddle.to_tensor(out), None, None

    monkeypatch.setattr(kernels.fused_functions, "fused_rotary_position_embedding", kernel)
    positions = paddle.to_tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    tables = rotary_tables(positions, 3, rotary_frequencies(tiny_config(head_dim=8)), interleaved=interleaved)
    x = values(10, 3, 8)
    turned = apply_rotary(x, tables).numpy()
    monkeypatch.setattr(kernels, "_chosen", FusedKernels())
    np.testing.assert_allclose(turned, apply_rotary(x, tables).numpy(), rtol=1e-5, atol=1e-6)


def test_norm_and_bias_get_what_they_need(chosen, monkeypatch):
    asked = []
    monkeypatch.setattr(
        kernels.fused_functions, "fused_rms_norm_ext", lambda x, weight, epsilon: asked.append(epsilon) or (x, None)
    )
    monkeypatch.setattr(kernels.fused_functions, "fused_linear", lambda x, weight, bias: asked.append(bias) or x)
    x = values(3, 4)
    rms_norm(x, values(4), 1e-5)
    with_bias = Linear(4, 4, bias=True)
    with_bias(x)
    assert asked[0] == 1e-5 and asked[1] is with_bias.bias
    Linear(4, 4)(x)
    assert len(asked) == 2


def test_a_model_reaches_each_of_them(chosen, monkeypatch):
    called = []
    for name in ("fused_rms_norm", "fused_swiglu", "fused_rotary"):
        module = {"fused_rms_norm": "norm", "fused_swiglu": "mlp", "fused_rotary": "rope"}[name]
        monkeypatch.setattr(
            f"erniekit.model.{module}.{name}", lambda x, *_, name=name: called.append(name) or x
        )  # fmt: skip
    model = tiny_model(num_hidden_layers=1)
    logits_of(model, range(6))
    assert {name: called.count(name) for name in called} == {
        "fused_rms_norm": 3, "fused_swiglu": 1, "fused_rotary": 2,
    }  # fmt: skip
