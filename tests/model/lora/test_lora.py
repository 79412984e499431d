"""Adapters: what they compute, what is trained, how they begin, and merging."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ConfigurationError
from erniekit.model.architectures.ernie4_5 import ERNIE4_5
from erniekit.model.head import token_loss
from erniekit.model.linear import Linear
from erniekit.model.lora.config import (
    LoraSettings,
    adapter_parameter_count,
    matches,
    select_targets,
)
from erniekit.model.lora.fingerprint import weights_fingerprint
from erniekit.model.lora.init import Factors, initial_factors, merged_weight, principal_factors
from erniekit.model.lora.lora import (
    AdapterBase,
    add_adapters,
    attach_adapter,
    local_adapters,
    merge_adapters,
    named_adapter_weights,
    named_adapters,
    named_linears,
    named_trainable_parameters,
)
from erniekit.model.randomness import Randomness
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights

from ..tiny import logits_of, pack, tiny_config, tiny_model

PATH = "model.layers.0.mlp.up_proj"
IDS = np.arange(24) % 53
LABELS = (np.arange(24) * 7 + 1) % 53
KINDS = {
    "LoRA": LoraSettings(4, 8.0),
    "rsLoRA": LoraSettings(4, 4.0, rslora=True),
    "DoRA": LoraSettings(4, 8.0, dora=True),
    "PiSSA": LoraSettings(4, 8.0, init="pissa"),
    "PiSSA, rsLoRA and DoRA": LoraSettings(3, 5.0, rslora=True, init="pissa", dora=True),
}


def with_adapters(settings, *, stirred=True, **shape):
    model = tiny_model(**shape)
    add_adapters(model, settings, seed=1)
    if stirred:
        rng = np.random.default_rng(2)
        for parameter in named_adapter_weights(model).values():
            noise = rng.standard_normal(parameter.shape).astype(np.float32) * 0.05
            parameter.set_value(parameter.numpy() + noise)
    return model


def backward(model):
    model.randomness.set(step=3, micro_batch=1)
    loss = token_loss(model, model(*pack(IDS, [9, 24])), paddle.to_tensor(LABELS[None])).loss_sum
    loss.backward()
    return float(loss)


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapters_change_nothing(kind):
    expected = logits_of(tiny_model(use_bias=True), IDS, [9, 24])
    model = with_adapters(KINDS[kind], stirred=False, use_bias=True)
    np.testing.assert_allclose(logits_of(model, IDS, [9, 24]), expected, atol=2e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_the_formula(dora):
    """W' = W + scaling A B, with DoRA each column stretched to its length; the bias stays outside."""
    rng = np.random.default_rng(0)
    linear = Linear(5, 3, bias=True)
    w, bias, x = rng.standard_normal((5, 3)), rng.standard_normal(3), rng.standard_normal((4, 5))
    a, b, lengths = rng.standard_normal((5, 2)), rng.standard_normal((2, 3)), rng.random(3) + 0.5
    linear.weight.set_value(w.astype(np.float32))
    linear.bias.set_value(bias.astype(np.float32))
    factors = Factors(a, b, lengths if dora else None)
    attach_adapter(linear, PATH, factors, LoraSettings(2, 6.0, dora=dora), AdapterBase(Randomness(0), "", ERNIE4_5))
    effective = w + 6.0 / 2 * a @ b
    if dora:
        effective *= lengths / np.linalg.norm(effective, axis=0)
    output = linear(paddle.to_tensor(x.astype(np.float32))).numpy()
    np.testing.assert_allclose(output, x @ effective + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merged_weight(w, factors, 3.0), effective, rtol=1e-5, atol=1e-5)


@given(
    inputs=st.integers(1, 12), outputs=st.integers(1, 12), rank=st.integers(1, 6), scaling=st.floats(0.1, 8.0),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None, derandomize=True)
def test_column_norms_without_the_product(inputs, outputs, rank, scaling, seed):
    rng = np.random.default_rng(seed)
    linear = Linear(inputs, outputs)
    linear.weight.set_value(rng.standard_normal((inputs, outputs)).astype(np.float32))
    a, b = rng.standard_normal((inputs, rank)), rng.standard_normal((rank, outputs))
    settings_, base = LoraSettings(rank, scaling * rank, dora=True), AdapterBase(Randomness(0), "", ERNIE4_5)
    attach_adapter(linear, PATH, Factors(a, b), settings_, base)
    expected = np.linalg.norm(linear.weight.numpy() + scaling * a @ b, axis=0)
    np.testing.assert_allclose(linear.adapter.column_norms(linear.weight).numpy(), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [None, Recompute(False), Recompute(True)], ids=["kept", "hooks", "PyLayer"])
def test_only_adapters_receive_gradients(kind, recompute):
    """With recomputation as well, although the embedding is frozen."""
    model = with_adapters(KINDS[kind])
    model.recompute = recompute
    backward(model)
    for name, parameter in named_adapter_weights(model).items():
        assert np.abs(parameter.grad.numpy()).max() > 0, name
    assert all(parameter.grad is None and parameter.stop_gradient for parameter in named_weights(model).values())


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj",), ("v_proj",), ("up_proj",), ("gate_proj", "o_proj")])
@pytest.mark.parametrize("recompute", [None, Recompute(False), Recompute(True)], ids=["kept", "hooks", "PyLayer"])
def test_gradients_where_only_some_layers_have_adapters(targets, recompute):
    """The other inputs of attention and of the gated product then want none."""
    model = with_adapters(LoraSettings(2, 4.0, target_modules=targets))
    loss = backward(model)
    wanted = {name: parameter.grad.numpy() for name, parameter in named_adapter_weights(model).items()}
    assert {name.split(".")[-2] for name in wanted} == set(targets)
    again = with_adapters(LoraSettings(2, 4.0, target_modules=targets))
    again.recompute = recompute
    assert backward(again) == loss
    for name, parameter in named_adapter_weights(again).items():
        np.testing.assert_array_equal(parameter.grad.numpy(), wanted[name], err_msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_the_same_when_a_layer_is_computed_again(reentrant):
    settings_ = LoraSettings(4, 8.0, dropout=0.4)
    plain, recomputed = with_adapters(settings_), with_adapters(settings_)
    recomputed.recompute = Recompute(reentrant)
    assert backward(plain) == backward(recomputed)
    for name, parameter in named_adapter_weights(plain).items():
        np.testing.assert_array_equal(
            parameter.grad.numpy(), named_adapter_weights(recomputed)[name].grad.numpy(), err_msg=name
        )


def test_dropout_acts_on_the_adapter_in_training_alone():
    settings_ = LoraSettings(4, 8.0, dropout=0.4)
    model, without = with_adapters(settings_), with_adapters(LoraSettings(4, 8.0))
    model.randomness.set(step=1, micro_batch=0)
    trained = model(*pack(IDS, [24])).numpy()
    assert np.abs(trained - without(*pack(IDS, [24])).numpy()).max() > 1e-3
    np.testing.assert_array_equal(model(*pack(IDS, [24])).numpy(), trained)
    model.randomness.set(step=2, micro_batch=0)
    assert np.abs(model(*pack(IDS, [24])).numpy() - trained).max() > 1e-3
    model.randomness.set(step=2, micro_batch=0, dropout_scale=0.0)
    np.testing.assert_array_equal(model(*pack(IDS, [24])).numpy(), without(*pack(IDS, [24])).numpy())
    model.randomness.set(step=2, micro_batch=0)
    model.eval()
    np.testing.assert_array_equal(model(*pack(IDS, [24])).numpy(), without(*pack(IDS, [24])).numpy())
    fresh = with_adapters(settings_, stirred=False)  # B is zero: the frozen path is not dropped
    np.testing.assert_array_equal(fresh(*pack(IDS, [24])).numpy(), tiny_model()(*pack(IDS, [24])).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_merging(kind):
    model = with_adapters(KINDS[kind], use_bias=True)
    names = list(named_weights(model))
    expected = logits_of(model, IDS, [9, 24])
    merge_adapters(model)
    np.testing.assert_allclose(logits_of(model, IDS, [9, 24]), expected, atol=2e-5)
    assert named_adapters(model) == {} and list(named_weights(model)) == names
    assert list(named_trainable_parameters(model)) == names
    assert not any(parameter.stop_gradient for parameter in model.parameters())


def test_beginnings_depend_on_seed_and_path():
    a = initial_factors("x.q_proj", (8, 6), 4, seed=1)
    assert np.array_equal(a.A, initial_factors("x.q_proj", (8, 6), 4, seed=1).A)
    assert not np.array_equal(a.A, initial_factors("x.q_proj", (8, 6), 4, seed=2).A)
    assert not np.array_equal(a.A, initial_factors("x.k_proj", (8, 6), 4, seed=1).A)
    wide = initial_factors("w", (400, 6), 50, seed=0).A
    assert 0.95 / 20 < np.abs(wide).max() <= 1 / 20 and not a.B.any()
    np.testing.assert_allclose(wide.std(), 1 / 20 / np.sqrt(3), rtol=0.02)


def test_pissa_takes_the_best_approximation():
    weight = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    factors = principal_factors("p", weight, 3, scaling=2.0)
    left, values, right = np.linalg.svd(weight)
    np.testing.assert_allclose(2.0 * factors.A @ factors.B, left[:, :3] * values[:3] @ right[:3], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(factors.A, axis=0), np.linalg.norm(factors.B, axis=1), rtol=1e-5)
    np.testing.assert_allclose(merged_weight(weight, factors, 2.0), weight, atol=1e-6)
    with pytest.raises(ConfigurationError, match=r"p has only 7 singular values.*\n.*lora_rank: 7"):
        principal_factors("p", weight, 8, scaling=2.0)


def test_ranks_send_what_pissa_took_in_the_dtype_others_expect():
    """What PiSSA took is float32 in NumPy; the adapters beside it may be float64."""
    model = with_adapters(LoraSettings(4, 8.0, init="pissa"), stirred=False)
    paddle.set_default_dtype("float64")
    try:
        whole = local_adapters(model)
        starts = [name for name in whole.tensors if ".start_" in name]
        assert starts and {whole.read(name).dtype for name in starts} == {paddle.float64}
    finally:
        paddle.set_default_dtype("float32")


def test_pissa_leaves_the_rest_in_the_frozen_weight():
    before = tiny_model()
    model = with_adapters(LoraSettings(4, 8.0, init="pissa"), stirred=False)
    for path, linear in named_linears(model).items():
        weight = named_linears(before)[path].weight.numpy()
        values = np.linalg.svd(weight, compute_uv=False)
        rest = np.linalg.svd(linear.weight.numpy(), compute_uv=False)
        np.testing.assert_allclose(rest[: len(values) - 4], values[4:], atol=1e-5)


def test_the_fingerprint_is_of_the_original_weights():
    plain, other = tiny_model(), tiny_model(seed=9)
    assert weights_fingerprint(plain) == weights_fingerprint(tiny_model()) != weights_fingerprint(other)
    for kind in KINDS.values():
        adapter = next(iter(named_adapters(with_adapters(kind)).values()))
        assert adapter.base.fingerprint == weights_fingerprint(plain)


PATHS = [f"model.layers.{layer}.{name}" for layer in range(12) for name in ("self_attn.q_proj", "mlp.up_proj")]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [
        ((), 24),
        (("q_proj",), 12),
        (("self_attn.q_proj", "up_proj"), 24),
        (("model.layers.1.mlp.up_proj",), 1),
        (("layers.1.mlp.up_proj",), 1),
        (("model.layers.1.*",), 2),
        (("model.layers.[0-3].*",), 8),
        ((r"re:model\.layers\.1\d\..*",), 4),
    ],
)
def test_targets(patterns, count):
    targets = select_targets(PATHS, patterns)
    assert len(targets) == count and targets == [path for path in PATHS if path in set(targets)]


def test_a_pattern_that_names_nothing_is_an_error_with_the_names():
    with pytest.raises(ConfigurationError) as refused:
        select_targets(PATHS, ["q_proj", "proj", "re:q_proj"])
    assert "'proj', 're:q_proj' names no linear layer" in str(refused.value)
    assert "There are: model.layers.*.self_attn.q_proj, model.layers.*.mlp.up_proj" in str(refused.value)
    assert not matches("_proj", "a.q_proj")


@pytest.mark.parametrize(
    "settings_",
    [*KINDS.values(), LoraSettings(5, 1.0, target_modules=("v_proj",), rank_pattern={r"layers\.1\..*": 2})],
)
def test_counting_needs_no_model(settings_):
    model = with_adapters(settings_)
    config = tiny_config()
    count = sum(parameter.size for parameter in named_adapter_weights(model).values())
    assert adapter_parameter_count(config, settings_) == count
    assert list(config.linear_shapes()) == list(named_linears(model))


def test_the_layer_that_joins_state_and_embedding_has_an_adapter_too():
    """It is a stage of its own, not a layer inside one."""
    shape = {"model_type": "ernie4_5_moe", "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 8}
    shape |= {"num_nextn_predict_layers": 2}
    weights = list(named_weights(tiny_model(**shape)))
    model = with_adapters(LoraSettings(4, 8.0), **shape)
    assert list(named_weights(model)) == weights
    config = tiny_config(**shape)
    assert set(config.linear_shapes()) == set(named_linears(model)) == set(named_adapters(model))
    assert "model.mtp_linear_proj.1" in named_adapters(model)
    count = sum(parameter.size for parameter in named_adapter_weights(model).values())
    assert adapter_parameter_count(config, LoraSettings(4, 8.0)) == count


def test_merging_leaves_what_was_trained_before_and_no_more():
    shape = {"model_type": "ernie4_5_moe", "moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 8}
    trained = {name: not weight.stop_gradient for name, weight in named_weights(tiny_model(**shape)).items()}
    model = with_adapters(LoraSettings(4, 8.0), **shape)
    merge_adapters(model)
    assert {name: not weight.stop_gradient for name, weight in named_weights(model).items()} == trained
    assert not all(trained.values()) and not named_adapters(model)


def test_dora_beside_an_output_without_weights():
    """Pruned models have such; it stays at zero, in training and when it is merged."""
    model = tiny_model()
    linear = model.layers[0].mlp.up_proj
    weight = linear.weight.numpy()
    weight[:, 3] = 0.0
    linear.weight.set_value(weight)
    expected = logits_of(model, IDS)
    add_adapters(model, KINDS["DoRA"], seed=1)
    adapter, factors = linear.adapter, Factors(*(p.numpy() for p in linear.adapter.parameters()))
    np.testing.assert_allclose(logits_of(model, IDS), expected, atol=1e-4)
    for merged in (adapter.effective_weight(linear.weight).numpy(), merged_weight(weight, factors, adapter.scaling)):
        np.testing.assert_allclose(merged, weight, atol=1e-6)
    merge_adapters(model)
    np.testing.assert_allclose(logits_of(model, IDS), expected, atol=1e-4)


def test_scaling():
    assert LoraSettings(8, 16.0).scaling_of("a") == 2.0
    assert LoraSettings(16, 4.0, rslora=True).scaling_of("a") == 1.0
    patterned = LoraSettings(8, 16.0, rank_pattern={"q_proj": 4}, alpha_pattern={r"layers\.1\..*": 32.0})
    assert patterned.scaling_of("layers.0.k_proj") == 2.0
    assert patterned.scaling_of("layers.0.q_proj") == 4.0
    assert patterned.scaling_of("model.layers.1.q_proj") == 8.0
