"""Recomputation changes memory and time, never a loss or a gradient."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.head import token_loss
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights

from .tiny import pack, tiny_model

IDS = np.arange(24) % 53
LABELS = (np.arange(24) * 7 + 1) % 53


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


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("first_layer", [0, 1, 5])
def test_losses_and_gradients_are_the_same_to_the_bit(use_reentrant, first_layer):
    loss, gradients = loss_and_gradients(None)
    again, recomputed = loss_and_gradients(Recompute(use_reentrant, first_layer))
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_frozen_embedding_leaves_the_gradients_of_the_layers(use_reentrant):
    options = {"frozen": ("embed_tokens", "layernorm"), "tie_word_embeddings": False}
    _, gradients = loss_and_gradients(None, **options)
    _, recomputed = loss_and_gradients(Recompute(use_reentrant), **options)
    assert np.abs(recomputed["model.layers.0.self_attn.q_proj.weight"]).max() > 0
    for name, gradient in gradients.items():
        if gradient is None:
            assert recomputed[name] is None, name
        else:
            np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


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
