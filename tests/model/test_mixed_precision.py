"""Mixed precision on a machine that has none: what Paddle's AMP would be told, and what is refused."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import paddle
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import ConfigurationError
from erniekit.model import mixed_precision
from erniekit.model.autograd import disable_autocast
from erniekit.model.mixed_precision import MixedPrecision
from erniekit.model.norm import RMSNorm
from erniekit.model.recompute import Recompute
from erniekit.model.weights import load_weights, named_weights, save_model_folder
from erniekit.training.optim.adamw import (
    build_optimizer,
    is_master_weight,
    load_optimizer_state,
    optimizer_state,
)

from .tiny import EXPERTS, logits_of, pack, tiny_model


@pytest.fixture
def amp(monkeypatch):
    """A device that computes in 16 bits, as far as one can tell; what AMP is told is recorded, and does nothing."""
    told = {"contexts": [], "inside": [], "decorated": []}

    @contextmanager
    def auto_cast(enable=True, **options):
        told["contexts"].append(options if enable else "off")
        told["inside"].append(options if enable else "off")
        yield
        told["inside"].pop()

    monkeypatch.setattr(paddle.amp, "auto_cast", auto_cast)
    monkeypatch.setattr(paddle.amp, "decorate", lambda model, **options: told["decorated"].append(options))
    monkeypatch.setattr(mixed_precision, "check_device", lambda dtype: None)
    return told


def test_a_device_without_it_refuses():
    if paddle.get_device().startswith("gpu"):
        pytest.skip("this device may have it")
    with pytest.raises(ConfigurationError, match="bf16: true: cpu does not compute in bfloat16"):
        MixedPrecision("bfloat16").apply_to(tiny_model())


@pytest.mark.parametrize("recompute", [None, Recompute(False), Recompute(True)])
def test_layers_are_cast_and_head_norm_and_router_are_not(amp, recompute):
    model = tiny_model(**EXPERTS)
    plain = logits_of(model, range(12))
    found = {}

    def record(name, layer):
        layer.register_forward_pre_hook(lambda *_: found.setdefault(name, []).append((amp["inside"] or ["none"])[-1]))

    record("linear", model.layers[1].self_attn.q_proj)
    record("expert", next(layer for name, layer in model.named_sublayers() if name.endswith("shared_experts.up_proj")))
    for name in ("norm", "head", "embedding"):
        record(name, getattr(model, name))
    gate = model.layers[1].mlp.gate
    original = gate.forward
    gate.forward = lambda x: found.setdefault("gate", []).append(amp["inside"][-1]) or original(x)
    precision = MixedPrecision("bfloat16", "O1", ("lookup_table", "matmul"), ("reduce_sum",))
    precision.apply_to(model)
    model.recompute = recompute
    np.testing.assert_array_equal(logits_of(model, range(12)), plain)
    model(*pack(range(12), [12])).sum().backward()
    assert amp["inside"] == [] and amp["decorated"] == []
    cast = {
        "custom_white_list": ["lookup_table", "matmul"], "custom_black_list": ["reduce_sum"], "level": "O1",
        "dtype": "bfloat16",
    }  # fmt: skip
    assert all(inside == cast for name in ("linear", "expert") for inside in found[name])
    assert all(inside == "none" for name in ("norm", "head", "embedding") for inside in found[name])
    assert set(found["gate"]) == {"off"}


def test_level_o2_leaves_norms_head_and_routers_in_float32(amp):
    MixedPrecision("float16", "O2", master_grad=True).apply_to(tiny_model())
    (options,) = amp["decorated"]
    assert options["level"] == "O2" and options["dtype"] == "float16" and options["master_grad"]
    assert {RMSNorm, paddle.nn.LayerNorm} <= set(options["excluded_layers"])


def test_functions_with_their_own_backward_pass_are_not_cast(monkeypatch):
    assert type(disable_autocast()).__name__ == "nullcontext"  # nothing casts here
    off = []
    monkeypatch.setattr(paddle.base.framework._dygraph_tracer(), "_amp_level", paddle.base.core.AmpLevel.O1)
    monkeypatch.setattr(paddle.amp, "auto_cast", lambda enable: off.append(enable))
    disable_autocast()
    assert off == [False]


def in_bfloat16(model):
    for layer in model.sublayers():
        if layer.parameters(include_sublayers=False) and not isinstance(layer, RMSNorm):
            layer.to(dtype="bfloat16")
    return model


def test_16_bit_weights_load_and_save_losslessly(tmp_path):
    rounded = tiny_model()
    for weight in named_weights(rounded).values():
        weight.set_value(weight.astype("bfloat16").astype("float32"))
    save_model_folder(rounded, tmp_path / "float32")
    narrow = in_bfloat16(tiny_model(seed=5))
    load_weights(narrow, tmp_path / "float32")
    assert named_weights(narrow)["model.layers.0.mlp.up_proj.weight"].dtype == paddle.bfloat16
    save_model_folder(narrow, tmp_path / "again")
    again = (tmp_path / "again/model.safetensors").read_bytes()
    assert again == (tmp_path / "float32/model.safetensors").read_bytes()


def test_float32_copies_of_16_bit_weights_are_kept_with_the_state():
    weights = named_weights(in_bfloat16(tiny_model()))
    state = optimizer_state(build_optimizer(weights, TrainingParameters()), weights)
    name = "model.layers.0.mlp.up_proj.weight"
    assert state[f"{name}/master_weight"].dtype == paddle.float32
    assert "model.norm.weight/master_weight" not in state
    stored = {key: np.full(tensor.shape, 1 / 3, np.float32) for key, tensor in state.items()}
    other = build_optimizer(weights, TrainingParameters())
    load_optimizer_state(other, weights, stored, stored.__getitem__)
    for key, tensor in optimizer_state(other, weights).items():
        if not is_master_weight(key):  # those: training/test_master_weights.py
            np.testing.assert_array_equal(tensor.numpy(), stored[key], err_msg=key)
