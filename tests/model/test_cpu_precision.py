"""Which layers of a decoder compute in bfloat16 on a CPU, in forward and where they are recomputed, and which gradients
are rounded."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import bf16
from erniekit.model.bf16 import HEAD, LINEAR, PRODUCTS
from erniekit.model.cpu_precision import CpuBFloat16, chosen_products, without_effect
from erniekit.model.head import token_loss
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights

from .tiny import EXPERTS, pack, tiny_model

TOKENS = np.arange(12)


def now() -> frozenset[str]:
    return frozenset(filter(bf16.computes, PRODUCTS))


def gradients(model: paddle.nn.Layer) -> dict[str, np.ndarray]:
    hidden = model(*pack(TOKENS, [12]))
    token_loss(model, hidden, paddle.to_tensor(TOKENS[None]), fused=True).loss_sum.backward()
    return {name: weight.grad.numpy() for name, weight in named_weights(model).items() if weight.grad is not None}


@pytest.mark.parametrize("products", [PRODUCTS, frozenset({LINEAR})])
def test_each_block_computes_its_own_products(products: frozenset[str]) -> None:
    model, found = tiny_model(**EXPERTS), {}
    CpuBFloat16(products).apply_to(model)
    for name, layer in [
        ("linear", model.layers[1].self_attn.q_proj),
        ("shared expert", model.layers[1].mlp.shared_experts.up_proj),
    ]:
        layer.register_forward_pre_hook(lambda *_, name=name: found.update({name: now()}))
    gate = model.layers[1].mlp.gate
    forward = gate.forward
    gate.forward = lambda x: found.setdefault("gate", now()) and forward(x)
    model.head(model(*pack(TOKENS, [12])), lambda rows: found.setdefault("head", now()))
    assert found["linear"] == found["shared expert"] == found["gate"] == {LINEAR}  # a router has no linear layer
    assert found["head"] == products & {HEAD} and now() == frozenset()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_what_is_recomputed_computes_as_before(granularity: str, reentrant: bool) -> None:
    model, found = tiny_model(), []
    CpuBFloat16().apply_to(model)
    part = model.layers[0].self_attn
    for layer in (part.q_proj, model.layers[0].mlp.down_proj):
        layer.register_forward_pre_hook(lambda *_: found.append(now()))
    model.train()
    model.recompute = Recompute(reentrant, 0, granularity)
    gradients(model)
    assert len(found) == {"full": 4, "full_attn": 3, "core_attn": 2}[granularity]
    assert set(found) == {frozenset({LINEAR})}


def test_rounded_gradients_are_those_of_weights_that_a_gpu_stores_in_16_bits() -> None:
    plain, rounded = tiny_model(), tiny_model()
    CpuBFloat16(frozenset(), rounded_gradients=True).apply_to(rounded)
    expected, found = gradients(plain), gradients(rounded)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        as_16_bits = paddle.to_tensor(values).astype("bfloat16").astype("float32").numpy()
        is_linear = name.endswith("_proj.weight")
        np.testing.assert_array_equal(found[name], as_16_bits if is_linear else values, err_msg=name)
        assert not is_linear or not np.array_equal(values, as_16_bits)


def test_the_black_list_chooses_products() -> None:
    loss = "softmax_with_cross_entropy"
    assert chosen_products(()) == chosen_products(("exp",)) == PRODUCTS
    assert chosen_products((loss,)) == {LINEAR}
    assert chosen_products((loss, "matmul_v2")) == chosen_products(("matmul",)) == frozenset()
    assert without_effect(("matmul", "flash_attn", loss, "exp")) == ["flash_attn", "exp"]


def test_it_says_what_computes_how() -> None:
    assert str(CpuBFloat16()) == "bfloat16 products of linear layers and head; float32 weights, float32 gradients"
    assert "of linear layers; " in str(CpuBFloat16(frozenset({LINEAR})))
    assert "of head; float32 weights, gradients rounded to bfloat16" in str(CpuBFloat16(frozenset({HEAD}), True))
