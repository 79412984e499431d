"""Recomputation changes memory and time, never a loss or a gradient."""

from __future__ import annotations

from collections import Counter

import numpy as np
import paddle
import pytest

from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights
from erniekit.training.objectives.forward import embedding_inputs
from erniekit.training.objectives.objective import supervised

from .tiny import EXPERTS, pack, tiny_model
from .tiny_audio import FAMILIES, audio_batch, audio_config

IDS = np.arange(24) % 53
LABELS = (np.arange(24) * 7 + 1) % 53
GRANULARITIES = ["full", "full_attn", "core_attn"]
ONLY_EXPERTS = {**EXPERTS, "moe_layer_start_index": 0}


def loss_and_gradients(recompute, *, frozen=(), layers=2, **options):
    model = tiny_model(num_hidden_layers=layers, hidden_dropout=0.2, attention_dropout=0.2, **options)
    model.recompute = recompute
    model.randomness.set(step=3, micro_batch=1)
    parameters = named_weights(model)
    for name, parameter in parameters.items():
        parameter.stop_gradient = any(part in name for part in frozen)
    hidden = model(*pack(IDS, [9, 24]))
    loss = token_loss(model, hidden, paddle.to_tensor(LABELS[None])).loss_sum
    loss.backward()
    return float(loss), {name: None if p.grad is None else p.grad.numpy() for name, p in parameters.items()}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("first_layer", [0, 1, 5])
@pytest.mark.parametrize("experts", [{}, ONLY_EXPERTS], ids=["dense", "experts"])
def test_losses_and_gradients_are_the_same_to_the_bit(use_reentrant, first_layer, granularity, experts):
    loss, gradients = loss_and_gradients(None, **experts)
    again, recomputed = loss_and_gradients(Recompute(use_reentrant, first_layer, granularity), **experts)
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("frozen", [("embed_tokens", "layernorm"), ("embed_tokens", "layernorm", "k_proj", "v_proj")])
def test_a_frozen_embedding_leaves_the_gradients_of_the_layers(use_reentrant, granularity, frozen):
    options = {"frozen": frozen, "tie_word_embeddings": False}
    _, gradients = loss_and_gradients(None, **options)
    _, recomputed = loss_and_gradients(Recompute(use_reentrant, 0, granularity), **options)
    assert np.abs(recomputed["model.layers.0.self_attn.q_proj.weight"]).max() > 0
    for name, gradient in gradients.items():
        if gradient is None:
            assert recomputed[name] is None, name
        else:
            np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "o_proj"), ("down_proj",)])
def test_adapters_have_the_same_gradients(use_reentrant, granularity, targets):
    """Of a frozen first layer the attention product may have no gradient to give; adapters after it have one."""

    def gradients(recompute):
        model = tiny_model(hidden_dropout=0.2, attention_dropout=0.2)
        add_adapters(model, LoraSettings(rank=2, alpha=4, dropout=0.3, target_modules=targets), seed=1)
        for number, weight in enumerate(named_adapter_weights(model).values()):
            weight.set_value(np.random.default_rng(number).standard_normal(weight.shape).astype(np.float32))
        model.recompute = recompute
        hidden = model(*pack(IDS, [9, 24]))
        token_loss(model, hidden, paddle.to_tensor(LABELS[None])).loss_sum.backward()
        return {name: weight.grad.numpy() for name, weight in named_adapter_weights(model).items()}

    plain, recomputed = gradients(None), gradients(Recompute(use_reentrant, 0, granularity))
    assert plain and all(np.abs(gradient).max() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("granularity", "again"), [("full", {"attention", "product", "mlp"}), ("full_attn", {"attention", "product"}),
                               ("core_attn", {"product"})],
)  # fmt: skip
def test_what_is_computed_again_in_backward(use_reentrant, granularity, again, monkeypatch):
    counted = Counter()
    model = tiny_model(num_hidden_layers=1)
    model.layers[0].self_attn.register_forward_pre_hook(lambda layer, inputs: counted.update(["attention"]))
    model.layers[0].mlp.register_forward_pre_hook(lambda layer, inputs: counted.update(["mlp"]))
    attend = AttentionPlan.attend

    def counting(self, *arguments, **named):
        counted.update(["product"])
        return attend(self, *arguments, **named)

    monkeypatch.setattr(AttentionPlan, "attend", counting)
    model.recompute = Recompute(use_reentrant, 0, granularity)
    model(*pack(IDS, [24])).sum().backward()
    assert {part for part, count in counted.items() if count == 2} == again
    assert set(counted.values()) <= {1, 2} and len(counted) == 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_every_layer_is_computed_again_in_backward(use_reentrant):
    counted = []
    model = tiny_model(num_hidden_layers=2)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: counted.append(layer.layer))
    model.recompute = Recompute(use_reentrant)
    model(*pack(IDS, [24])).sum().backward()
    assert counted == [0, 1, 1, 0]


def test_evaluation_computes_every_layer_once():
    counted = []
    model = tiny_model()
    model.recompute = Recompute(True)
    model.eval()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: counted.append(layer.layer))
    model(*pack(IDS, [24]))
    assert counted == [0, 1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_frozen_layer_of_the_decoder_is_recomputed_too(use_reentrant):
    """Of ranks that divide experts, one may hold none that is trained, and all have to repeat the collectives."""
    model = tiny_model()
    add_adapters(model, LoraSettings(2, 4.0, target_modules=("model.layers.1",)), seed=1)
    model.recompute = Recompute(use_reentrant)
    calls = Counter()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: calls.update([layer.layer]))
    hidden = model(*pack(IDS, [24]))
    token_loss(model, hidden, paddle.to_tensor(LABELS[None])).loss_sum.backward()
    assert calls == {0: 2, 1: 2}


class _Encoder(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = paddle.nn.Linear(3, 3), 0

    def forward(self, x, factor):
        self.calls += 1
        return paddle.tanh(self.linear(x)) * factor


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("trained", "training", "calls"), [(True, True, 2), (False, True, 1), (True, False, 1)])
def test_layers_of_encoders_are_recomputed_whole(use_reentrant, trained, training, calls):
    """Their input, a spectrogram, has no gradient. Frozen ones, and all outside of training, run once."""
    paddle.seed(3)
    layer, x = _Encoder(), paddle.ones([2, 3])
    layer.linear.weight.stop_gradient = layer.linear.bias.stop_gradient = not trained
    layer.train() if training else layer.eval()
    plain = layer(x, 2.0)
    layer.calls = 0
    again = Recompute(use_reentrant).whole_layer(layer, x, 2.0)
    np.testing.assert_array_equal(again.numpy(), plain.numpy())
    assert again.stop_gradient == (not trained)
    gradients = []
    for output in (plain, again) if trained else ():
        output.sum().backward()
        gradients.append(layer.linear.weight.grad.numpy())
        layer.clear_gradients()
    assert layer.calls == calls
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, gradients[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_audio_encoder_learns_the_same_to_the_bit(family, use_reentrant):
    config, loss = audio_config(family), supervised().loss
    results = []
    for recompute in (None, Recompute(use_reentrant)):
        model = build_model(config, None, seed=5, recompute=recompute)
        result = loss(model, audio_batch(config, 2, 1))
        result.loss_sum.backward()
        results.append((float(result.loss_sum), {name: w.grad for name, w in named_weights(model).items()}))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        if name != "audio_tower.embed_positions.weight":  # fixed
            np.testing.assert_array_equal(results[1][1][name].numpy(), gradient.numpy(), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_a_recording_reaches_the_encoder_and_changes_nothing(family):
    config = audio_config(family)
    model, batch = build_model(config, None, seed=5), audio_batch(config, 0, 1)
    hidden = model.embed(embedding_inputs(model, batch))
    np.testing.assert_array_equal(hidden.numpy(), model.embedding(paddle.to_tensor(batch.input_ids)).numpy())
    hidden.sum().backward()
    for name, weight in named_weights(model).items():
        if "audio_tower.conv" in name or name.startswith("multi_modal_projector."):
            assert weight.grad is not None and not weight.grad.numpy().any(), name
