"""Products in bfloat16: as NumPy computes them from rounded operands, in every place that has products of its own.

A processor without such products runs these tests, too: there float32 multiplies the rounded operands.
"""

from __future__ import annotations

import ctypes
import functools
import gc

import numpy as np
import paddle
import pytest

from erniekit.model import bf16
from erniekit.model import head as head_module
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.cpu_gradients import linear
from erniekit.model.head import token_log_probabilities, token_loss
from erniekit.model.linear import Linear
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights
from erniekit.model.quantization.formats import INT4, INT8
from erniekit.model.quantization.packed import PackedWeight
from erniekit.model.recompute import Recompute
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL
from erniekit.model.vocabulary import grow, grown_vocabulary
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.native import onednn

from .tiny import EXPERTS, pack, tiny_model

IDS = np.random.default_rng(0).integers(0, 53, 40)
LABELS = np.where(np.random.default_rng(1).random(40) < 0.4, -100, np.roll(IDS, -1))
ONLY_EXPERTS = {**EXPERTS, "moe_layer_start_index": 0}
HEADS = [{}, {"sparse": True}, {"fused": True}]


def rounded(values):
    """float32 values, rounded to the nearest bfloat16, ties to even."""
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def product(a, b):
    return (rounded(a).astype(np.float64) @ rounded(b).astype(np.float64)).astype(np.float32)


def assert_close(own, expected, tolerance=1e-6):
    np.testing.assert_allclose(own, expected, atol=tolerance * max(np.abs(expected).max(initial=0), 1e-30), rtol=0)


def parameter(values):
    made = paddle.create_parameter(list(values.shape), "float32")
    made.set_value(values)
    return made


@pytest.fixture
def in_numpy(monkeypatch):
    """Call it to let NumPy round and multiply from now on, with the same rules."""

    def array(pointer, dtype, *shape):
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(dtype)), shape)

    def round_to_bfloat16(count, source, target):
        if count:
            upper = rounded(array(source, ctypes.c_float, count)).view(np.uint32) >> 16
            array(target, ctypes.c_uint16, count)[:] = upper

    def multiply(m, n, k, a, b, c, *, transpose_a=False, transpose_b=False, add=False):
        left, right = (
            (array(pointer, ctypes.c_uint16, *shape).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            for pointer, shape in ((a, (k, m) if transpose_a else (m, k)), (b, (n, k) if transpose_b else (k, n)))
        )
        out = array(c, ctypes.c_float, m, n)
        out[:] = (left.T if transpose_a else left) @ (right.T if transpose_b else right) + (out if add else 0)

    def switch():
        monkeypatch.setattr(onednn, "round_to_bfloat16", round_to_bfloat16)
        monkeypatch.setattr(onednn, "multiply", multiply)
        monkeypatch.setattr(onednn, "problem", lambda: None)

    return switch


@pytest.mark.parametrize("shape", [(7, 17, 255), (1, 1, 1), (33, 64, 48)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_a_product_and_its_gradients_are_those_of_rounded_operands(shape, transposed, frozen):
    tokens, inputs, outputs = shape
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.standard_normal(size, np.float32) for size in ((2, tokens, inputs), (inputs, outputs), (2, tokens, outputs))
    )
    tensor = paddle.to_tensor(x, stop_gradient=frozen == "x")
    weight = parameter(w.T if transposed else w)
    weight.stop_gradient = frozen == "weight"
    out = bf16.linear(tensor, weight, transpose_weight=transposed)
    assert_close(out.numpy(), product(x, w))
    out.backward(paddle.to_tensor(g))
    rows, grad = x.reshape(-1, inputs), g.reshape(-1, outputs)
    if frozen != "x":
        assert_close(tensor.grad.numpy(), product(grad, w.T).reshape(x.shape))
    if frozen != "weight":
        assert_close(weight.grad.numpy(), product(grad.T, rows) if transposed else product(rows.T, grad))


def test_no_rows_give_no_outputs_and_a_gradient_of_zeros():
    x, weight = paddle.zeros([0, 5]), parameter(np.ones((5, 3), np.float32))
    x.stop_gradient = False
    out = bf16.linear(x, weight)
    out.sum().backward()
    assert out.shape == [0, 3] and x.grad.shape == [0, 5] and not weight.grad.numpy().any()


def test_tensors_that_are_views_are_read_in_their_order():
    rng = np.random.default_rng(0)
    x, w, g = rng.standard_normal((6, 5), np.float32), rng.standard_normal((6, 4), np.float32), np.ones((4, 5), "f4")
    tensor, weight = paddle.to_tensor(x).T, parameter(w)
    out = bf16.linear(tensor, weight)
    assert_close(out.numpy(), product(x.T, w))
    out.backward(paddle.to_tensor(g).T)
    assert_close(weight.grad.numpy(), product(x, g.T))


def test_only_what_is_enabled_and_float32_is_computed_in_bfloat16():
    x, weight = paddle.rand([3, 4]), paddle.rand([4, 5])
    exact = linear(x, weight, None).numpy()
    with bf16.products(frozenset({bf16.HEAD})):
        np.testing.assert_array_equal(linear(x, weight, None).numpy(), exact)
        assert bf16.computes(bf16.HEAD, x) and not bf16.computes(bf16.LINEAR, x)
        with bf16.products():
            assert bf16.computes(bf16.LINEAR, x, weight)
            assert not bf16.computes(bf16.LINEAR, x, weight.astype("float64"))
            assert_close(linear(x, weight, None).numpy(), product(x.numpy(), weight.numpy()))
        assert not bf16.computes(bf16.LINEAR, x)
        with bf16.float32_products(), bf16.products():
            assert bf16.enabled() == frozenset()
        assert bf16.enabled() == {bf16.HEAD}
    assert bf16.enabled() == frozenset()


def test_a_recorded_program_stays_in_float32():
    layer = Linear(4, 3)
    layer.set_dense_weight(paddle.full([4, 3], 1 + 2**-10))
    program = paddle.jit.to_static(layer, full_graph=True)
    with bf16.products():
        np.testing.assert_array_equal(program(paddle.ones([1, 4])).numpy(), np.full((1, 3), 4 + 2**-8, np.float32))


def test_a_bias_is_added_in_float32_with_its_gradient():
    x, w, b = paddle.rand([3, 4]), parameter(np.ones((4, 2), "f4")), parameter(np.full(2, 1 + 2**-12, np.float32))
    with bf16.products():
        out = linear(x, w, b)
    np.testing.assert_array_equal(out.numpy(), product(x.numpy(), w.numpy()) + b.numpy())
    out.sum().backward()
    np.testing.assert_array_equal(b.grad.numpy(), [3, 3])


# Models: NumPy's products in place of oneDNN's give the same. A sum that differs in its last bit may be rounded to the
# other neighbour in the next layer, a relative 0.4%, hence the bound.


def in_bfloat16(function):
    @functools.wraps(function)
    def run(*arguments, **named):
        with bf16.products():
            return function(*arguments, **named)

    return run


def with_blocks_in_bfloat16(decoder):
    for _, block in decoder.named_blocks():
        block.forward = in_bfloat16(block.forward)
    return decoder


def loss_and_gradients(decoder, parameters=None, logps=False, **head):
    decoder.clear_gradients()
    hidden = decoder(*pack(IDS, [15, 40]))
    function = token_log_probabilities if logps else token_loss
    result = function(decoder, hidden, paddle.to_tensor(LABELS[None]), **head)
    loss = (result.values * paddle.linspace(0.5, 2, result.values.shape[0])).sum() if logps else result.loss_sum
    loss.backward()
    parameters = parameters or named_weights(decoder)
    return float(loss), {name: weight.grad.numpy() for name, weight in parameters.items() if weight.grad is not None}


def assert_like_numpy(run, in_numpy):
    loss, gradients = run()
    in_numpy()
    expected_loss, expected = run()
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert gradients.keys() == expected.keys() and gradients
    for name, gradient in gradients.items():
        difference = np.linalg.norm(gradient - expected[name])
        assert difference <= 2e-3 * np.linalg.norm(expected[name]) + 1e-6, name


@pytest.mark.parametrize("family", [{}, {"tie_word_embeddings": False, "use_bias": True}, ONLY_EXPERTS])
@pytest.mark.parametrize("head", HEADS, ids=["plain", "sparse", "fused"])
@pytest.mark.parametrize("logps", [False, True], ids=["loss", "log-probabilities"])
def test_models_compute_as_numpy_does(family, head, logps, in_numpy, monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", 53 * 7)
    decoder = with_blocks_in_bfloat16(tiny_model(**family))
    assert_like_numpy(lambda: loss_and_gradients(decoder, logps=logps, **head), in_numpy)


@pytest.mark.parametrize("head", HEADS, ids=["plain", "sparse", "fused"])
def test_rounding_changes_a_loss_by_little_and_by_something(head):
    decoder = tiny_model()
    exact, exact_gradients = loss_and_gradients(decoder, **head)
    loss, gradients = loss_and_gradients(with_blocks_in_bfloat16(decoder), **head)
    assert loss != exact and loss == pytest.approx(exact, rel=1e-2)
    for name, gradient in gradients.items():
        difference = np.linalg.norm(gradient - exact_gradients[name]) / np.linalg.norm(exact_gradients[name])
        assert 0 < difference < 0.1, name


def test_every_product_of_a_block_is_in_bfloat16(monkeypatch):
    """Attention and elementwise operators have no matrix product with a weight left."""
    decoder = with_blocks_in_bfloat16(tiny_model(tie_word_embeddings=False))
    multiplied = []
    multiply = bf16._multiply
    monkeypatch.setattr(bf16, "_multiply", lambda *a, **named: multiplied.append(a) or multiply(*a, **named))
    loss_and_gradients(decoder, fused=True)
    linears = 2 * 7  # q, k, v, o, gate, up, down of both layers
    assert len(multiplied) == 3 * (linears + 1)  # and the head


@pytest.mark.parametrize("settings", [LoraSettings(2, 4.0), LoraSettings(2, 4.0, dora=True)], ids=["LoRA", "DoRA"])
def test_adapters_compute_as_numpy_does(settings, in_numpy):
    decoder = tiny_model()
    add_adapters(decoder, settings, seed=0)
    adapters = named_adapter_weights(decoder)
    for number, weight in enumerate(adapters.values()):
        weight.set_value(np.random.default_rng(number).standard_normal(weight.shape).astype(np.float32) * 0.3)
    with_blocks_in_bfloat16(decoder)
    assert_like_numpy(lambda: loss_and_gradients(decoder, adapters, fused=True), in_numpy)


@pytest.mark.parametrize("head", HEADS, ids=["plain", "sparse", "fused"])
@pytest.mark.parametrize("logps", [False, True], ids=["loss", "log-probabilities"])
def test_rows_of_new_tokens_compute_as_numpy_does(head, logps, in_numpy, tmp_path):
    save_model_folder(tiny_model(tie_word_embeddings=False), tmp_path / "base")
    config = ModelConfig.from_folder(tmp_path / "base")
    config = grow(config, grown_vocabulary(config, 53, 10))
    decoder = with_blocks_in_bfloat16(build_model(config, tmp_path / "base", lora=LoraSettings(2, 4.0)))
    adapters = named_adapter_weights(decoder)
    assert "lm_head.new_rows" in adapters
    assert_like_numpy(lambda: loss_and_gradients(decoder, adapters, logps, **head), in_numpy)


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
def test_frozen_weights_in_few_bits_are_rounded_like_dense_ones(form):
    layer = Linear(64, 6)
    packed = PackedWeight(form, layer.weight.dtype)
    packed.fill("weight", np.random.default_rng(0).standard_normal((6, 64), np.float32), NO_TENSOR_PARALLEL)
    layer.product, layer.weight = packed, None
    x, g = paddle.rand([5, 64]), paddle.rand([5, 6])
    x.stop_gradient = False
    with bf16.products():
        out = layer(x)
    out.backward(g)
    dense = packed.dense().numpy()
    assert_close(out.numpy(), product(x.numpy(), dense.T))
    assert_close(x.grad.numpy(), product(g.numpy(), dense))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
@pytest.mark.parametrize("family", [{}, ONLY_EXPERTS], ids=["dense", "experts"])
def test_recomputation_and_weights_that_are_rounded_once_give_the_same_bits(use_reentrant, granularity, family):
    def run(recompute):
        decoder = with_blocks_in_bfloat16(tiny_model(hidden_dropout=0.2, **family))
        decoder.recompute = recompute
        decoder.randomness.set(step=3, micro_batch=1)
        return loss_and_gradients(decoder)

    loss, gradients = run(None)
    with bf16.weights_stay():
        again, recomputed = run(Recompute(use_reentrant, 0, granularity))
    assert again == loss
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(recomputed[name], gradient, err_msg=name)


@pytest.mark.parametrize("axis", [0, 1], ids=["row parallel", "column parallel"])
def test_slices_of_a_weight_make_up_the_product_of_the_whole(axis):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((9, 10), np.float32), rng.standard_normal((10, 14), np.float32)
    whole = bf16.linear(paddle.to_tensor(x), parameter(w)).numpy()
    columns = np.split(x, 2, axis=1) if axis == 0 else [x, x]
    parts = [
        bf16.linear(paddle.to_tensor(np.ascontiguousarray(own)), parameter(np.ascontiguousarray(part))).numpy()
        for own, part in zip(columns, np.split(w, 2, axis=axis), strict=True)
    ]
    assert_close(parts[0] + parts[1] if axis == 0 else np.concatenate(parts, axis=1), whole)


# What is rounded when.


@pytest.fixture
def roundings(monkeypatch):
    """The shapes of what has been rounded."""
    made = []
    original = bf16._rounded
    monkeypatch.setattr(bf16, "_rounded", lambda x: made.append(tuple(x.shape)) or original(x))
    return made


def test_weights_are_rounded_once_where_they_stay(roundings):
    x, weight = paddle.ones([2, 4]), parameter(np.ones((4, 3), np.float32))
    with bf16.weights_stay():
        for _ in range(3):
            bf16.linear(x, weight).sum().backward()
        with bf16.weights_stay():
            bf16.linear(x, weight)
        bf16.linear(x, weight)
    assert roundings.count((4, 3)) == 1
    bf16.linear(x, weight)
    bf16.linear(x, weight)
    assert roundings.count((4, 3)) == 3


def test_nothing_rounded_is_kept_afterwards():
    with bf16.weights_stay():
        bf16.linear(paddle.ones([2, 4]), parameter(np.ones((4, 3), np.float32)))
        assert bf16._weights.get() and bf16._last_input
    assert bf16._weights.get() is None and bf16._last_input is None


def test_a_changed_weight_is_rounded_again():
    x, weight = paddle.ones([1, 1]), parameter(np.ones((1, 1), np.float32))
    for value in (1.0, 2.0, 3.0):
        weight.set_value(np.full((1, 1), value, np.float32))
        with bf16.weights_stay():
            assert float(bf16.linear(x, weight)) == float(bf16.linear(x, weight)) == value


def test_other_tensors_than_parameters_are_not_kept():
    with bf16.weights_stay():
        for _ in range(3):
            bf16.linear(paddle.ones([2, 4]), paddle.ones([4, 3]))
        assert not bf16._weights.get()


def test_an_input_of_several_layers_is_rounded_once_and_not_after_it_has_changed(roundings):
    x, weights = paddle.ones([2, 4]), [parameter(np.ones((4, 3), np.float32)) for _ in range(3)]
    for weight in weights:
        bf16.linear(x, weight)
    assert roundings.count((2, 4)) == 1
    x.add_(paddle.ones([2, 4]))
    assert float(bf16.linear(x, weights[0]).max()) == 8.0
    del x
    gc.collect()
    assert bf16._last_input.source() is None
    assert float(bf16.linear(paddle.zeros([2, 4]), weights[0]).max()) == 0.0
