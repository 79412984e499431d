"""Linear layers through 8-bit floats: values and gradients against NumPy, scales of activations, whole decoders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.inference.generation import generate, stream
from erniekit.inference.sampling import Sampling
from erniekit.model.builder import build_model
from erniekit.model.linear import Linear
from erniekit.model.quantization import float8, fp8
from erniekit.model.quantization.float8 import FP8_MAX, encode
from erniekit.model.quantization.fp8 import compute_in_fp8, read_averages, write_averages
from erniekit.model.quantization.hadamard import hadamard
from erniekit.model.quantization.settings import Fp8
from erniekit.model.randomness import Randomness
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights, save_model_folder

from ..tiny import logits_of, pack, tiny_config
from .test_float8 import nearest

IDS = [5, 9, 2, 40, 17, 3, 8]


def _rounded(x: np.ndarray, form: str = "e4m3", largest: float | None = None) -> np.ndarray:
    scale = np.float32((np.abs(x).max() if largest is None else largest) / FP8_MAX[form])
    return nearest((x / scale).astype(np.float32), form) * scale


def _linear(settings: Fp8, inputs: int = 64, outputs: int = 24) -> tuple[Linear, fp8.ActivationScales]:
    linear = Linear(inputs, outputs, bias=True)
    rng = np.random.default_rng(0)
    linear.weight.set_value(rng.standard_normal((inputs, outputs)).astype(np.float32) * 0.1)
    linear.bias.set_value(rng.standard_normal(outputs).astype(np.float32))
    return linear, compute_in_fp8({"q_proj": linear}, settings, Randomness(0))


def _input(seed: int = 1, size: float = 1.0) -> paddle.Tensor:
    x = np.random.default_rng(seed).standard_normal((2, 5, 64)).astype(np.float32) * size
    return paddle.to_tensor(x, stop_gradient=False)


@pytest.mark.parametrize("block", [0, 16, 64])
@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
def test_values_and_gradients(block: int, own: tuple[bool, bool], kind: str) -> None:
    """Against NumPy: the product of rounded factors, and gradients as if rounding were not there."""
    linear, _ = _linear(
        Fp8(hadamard_block=block, fp8_format_type=kind, quant_input_grad=own[0], quant_weight_grad=own[1])
    )
    x, weight = _input(), linear.weight.numpy()
    y = linear(x)
    rotation = np.kron(np.eye(64 // block), hadamard(block)) if block else np.eye(64)
    x_rounded, w_rounded = _rounded(x.numpy() @ rotation), _rounded(rotation @ weight)
    np.testing.assert_allclose(y.numpy(), x_rounded @ w_rounded + linear.bias.numpy(), rtol=2e-2, atol=2e-2)
    slope = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    (y * paddle.to_tensor(slope)).sum().backward()
    rounded = _rounded(slope, "e5m2" if kind == "hybrid" else "e4m3")
    for_x, for_weight = (rounded if each else slope for each in own)
    np.testing.assert_allclose(x.grad.numpy(), for_x @ (rotation @ w_rounded).T, rtol=2e-2, atol=2e-2)
    expected = np.einsum("bsi,bso->io", x_rounded @ rotation, for_weight)
    np.testing.assert_allclose(linear.weight.grad.numpy(), expected, rtol=2e-2, atol=5e-2)
    np.testing.assert_allclose(linear.bias.grad.numpy(), slope.sum((0, 1)), rtol=1e-4)


def test_fp8_product_is_close_and_rotation_helps_with_outliers() -> None:
    def error(block: int, outlier: float) -> float:
        linear, _ = _linear(Fp8(hadamard_block=block))
        values = _input().numpy()
        values[..., 7] *= outlier
        plain = values @ linear.weight.numpy() + linear.bias.numpy()
        found = linear(paddle.to_tensor(values)).numpy()
        return float(np.square(found - plain).mean() / np.square(plain).mean())

    assert 0 < error(64, 1.0) < 2e-3
    assert error(64, 1e5) < error(0, 1e5)


def test_a_frozen_weight_has_no_gradient_and_keeps_no_activations() -> None:
    linear, _ = _linear(Fp8(hadamard_block=32))
    linear.weight.stop_gradient = True
    x = _input()
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad is not None


def test_a_weight_of_another_precision_keeps_it() -> None:
    """As in mixed precision, whose 16 bits a CPU lacks: activations of 64 bits beside a weight of 32."""
    linear, _ = _linear(Fp8(hadamard_block=16))
    x = _input()
    wide = paddle.to_tensor(x.numpy().astype(np.float64), stop_gradient=False)
    expected, found = linear.product(x, linear), linear.product(wide, linear)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)
    found.sum().backward()
    assert (found.dtype, wide.grad.dtype, linear.weight.grad.dtype) == (paddle.float64, paddle.float64, paddle.float32)


def test_scales_follow_batches_at_first_and_then_an_average() -> None:
    linear, scales = _linear(Fp8(hadamard_block=0, apply_online_actscale_step=2, actscale_moving_rate=0.25))
    product = linear.product

    def step(number: int, *sizes: float) -> list[np.ndarray]:
        scales._randomness.set(step=number, micro_batch=0)
        outputs = [linear(_input(seed=3, size=size)).numpy() for size in sizes]
        scales.end_step()
        return outputs

    one = float(_input(seed=3).abs().max())
    first = step(0, 1.0, 2.0)
    np.testing.assert_allclose(
        (first[1] - linear.bias.numpy()) / 2, first[0] - linear.bias.numpy(), rtol=1e-5, atol=1e-5
    )
    assert product.average == pytest.approx(2 * one, rel=1e-6)  # the largest of the step
    step(1, 4.0)
    assert product.average == pytest.approx(3 * one, rel=1e-6)  # the mean, while it has seen few
    for number, before in ((2, 3.0), (3, 10 / 3)):
        (found,) = step(number, 4.0)
        x = _input(seed=3, size=4.0).numpy()
        expected = _rounded(x, largest=before * one) @ _rounded(linear.weight.numpy()) + linear.bias.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)
    assert product.average == pytest.approx(3.5 * one, rel=1e-5) and product.steps == 4
    linear.eval()
    linear(_input(size=100.0))
    scales.end_step()
    assert product.steps == 4  # evaluation teaches nothing


def test_without_first_steps_the_very_first_batch_still_has_a_scale() -> None:
    linear, scales = _linear(Fp8(apply_online_actscale_step=0))
    assert np.isfinite(linear(_input()).numpy()).all() and not scales.averages()
    scales.end_step()
    assert scales.averages().keys() == {"q_proj"}


def test_a_step_that_is_skipped_teaches_nothing() -> None:
    linear, scales = _linear(Fp8(hadamard_block=0))
    linear(_input(size=100.0))
    scales.end_step(skipped=True)
    linear(_input())
    scales.end_step()
    assert linear.product.steps == 1
    assert linear.product.average == pytest.approx(float(_input().abs().max()), rel=1e-6)


def test_averages_are_of_all_ranks() -> None:
    linear = Linear(64, 24)
    exchanged = []

    def all_gather_object(paths: list[str]) -> list[list[str]]:
        exchanged.append(paths)
        return [paths, ["elsewhere", "q_proj"]]

    others = np.array([7.0, 50.0], np.float32)  # in the order of the paths
    scales = compute_in_fp8(
        {"q_proj": linear}, Fp8(), Randomness(0), all_gather_object, lambda own: np.maximum(own, others)
    )
    for _ in range(3):
        linear(_input())
        scales.end_step()
        assert linear.product.average == 50.0
    assert exchanged == [["q_proj"]]  # once; steps send figures only


def test_experts_without_tokens_keep_their_average() -> None:
    linear, scales = _linear(Fp8())
    assert linear(paddle.zeros([0, 64])).shape == [0, 24]
    scales.end_step()
    assert linear.product.steps == 0


def test_blocks_that_do_not_divide_the_inputs_are_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"blocks of 32 do not divide[\s\S]*down_proj \(24 inputs\)[\s\S]*hadamard_block_size: 8",
    ):
        compute_in_fp8({"down_proj": Linear(24, 8)}, Fp8(hadamard_block=32), Randomness(0))


@pytest.fixture
def device_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What Paddle's FP8 product is given; computed here in float32 and left in float16, for a CPU has none."""
    calls: list[tuple] = []

    def product(
        x, y, transpose_x=False, transpose_y=False, bias=None, scale=1.0, output_dtype="float16", act="identity"
    ):
        calls.append((x.dtype, y.dtype, transpose_x, transpose_y, output_dtype))
        exact = paddle.matmul(x.astype("float32"), y.astype("float32"), transpose_x, transpose_y)
        return (exact * scale).astype("float16")

    monkeypatch.setattr(fp8, "has_fp8_products", lambda: True)
    monkeypatch.setattr(fp8, "HALF", (paddle.float32,))
    monkeypatch.setattr(paddle.linalg, "fp8_fp8_half_gemm_fused", product)
    return calls


def _factors(rows: tuple[int, ...], outputs: int, inputs: int) -> tuple[float8.Float8, float8.Float8]:
    rng = np.random.default_rng(0)
    x, w = (paddle.to_tensor(rng.uniform(0.5, 1, s).astype(np.float32)) for s in ((*rows, inputs), (outputs, inputs)))
    left, right = (encode(each, "e4m3", float8.amax(each)) for each in (x, w))
    return left, right


def test_a_product_of_the_device_gets_codes_and_a_transposed_weight(device_products: list[tuple]) -> None:
    """The sums of these codes reach 10^7, which float16 does not."""
    left, right = _factors((2, 3), 32, 64)
    expected = paddle.matmul(left.decoded(), right.decoded(), transpose_y=True)
    found = fp8.multiply(left, right, paddle.float32)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2**-10)
    assert device_products == [(paddle.float8_e4m3fn, paddle.float8_e4m3fn, False, True, "float32")]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [((0,), 32, 64), ((3,), 24, 64), ((3,), 32, 24)])
def test_what_the_device_does_not_take_is_multiplied_plainly(
    rows: tuple[int, ...], outputs: int, inputs: int, device_products: list[tuple]
) -> None:
    """Its product needs rows (experts may have none), and sides of whole 16 bytes."""
    assert fp8.multiply(*_factors(rows, outputs, inputs), paddle.float32).shape == [*rows, outputs]
    assert not device_products


# Whole decoders


def _loss(decoder) -> paddle.Tensor:
    logits = decoder.head(decoder(*pack(IDS, [4, 7])))
    return paddle.nn.functional.cross_entropy(logits[0], paddle.to_tensor([*IDS[1:], 1]))


def _decoder(settings: Fp8 | None = None, folder=None, **changes):
    settings = settings or Fp8(hadamard_block=8)
    return build_model(tiny_config(), folder, seed=2, quantization=settings, **changes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients_and_averages(reentrant: bool) -> None:
    def run(recompute: Recompute | None):
        decoder = _decoder(recompute=recompute)
        _loss(decoder).backward()
        decoder.end_step()
        gradients = {name: weight.grad.numpy() for name, weight in named_weights(decoder).items()}
        return gradients, decoder.activation_scales.averages()

    (plain, averages), (again, averages_again) = run(None), run(Recompute(reentrant))
    assert averages_again == averages and len(averages) == 14
    for name, gradient in again.items():
        np.testing.assert_array_equal(gradient, plain[name], err_msg=name)


def test_answering_rounds_every_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder()
    _loss(decoder)
    decoder.end_step()
    one_by_one = list(stream(decoder, IDS, Sampling(max_new_tokens=6)))
    rotated: list[int] = []
    monkeypatch.setattr(
        fp8, "hadamard_rotate", lambda x, block: rotated.append(len(x.shape)) or float8.hadamard_rotate(x, block)
    )
    assert generate(decoder, [IDS], Sampling(max_new_tokens=6)) == [one_by_one]
    assert rotated.count(2) == 14  # weights; activations have three axes
    linear = decoder.layers[0].mlp.up_proj
    linear.weight.set_value(paddle.zeros(linear.weight.shape))
    assert not linear(paddle.ones([2, linear.weight.shape[0]])).any()  # none is kept any longer


def test_a_saved_model_goes_on_with_its_averages(tmp_path) -> None:
    decoder = _decoder()
    _loss(decoder)
    decoder.end_step()
    save_model_folder(decoder, tmp_path)
    write_averages(tmp_path, decoder.activation_scales.averages())
    again = _decoder(folder=tmp_path)
    assert again.activation_scales.averages() == decoder.activation_scales.averages()
    for each in (decoder, again):
        each.eval()
    np.testing.assert_array_equal(logits_of(again, IDS), logits_of(decoder, IDS))
    (tmp_path / fp8.AVERAGES_FILE).write_text('{"q_proj": 3}')
    with pytest.raises(ModelFileError, match="expected for each linear layer"):
        read_averages(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"quant_input_grad": True, "quant_weight_grad": True}])
def test_training_reaches_the_loss_of_plain_training(changes: dict[str, bool]) -> None:
    """120 steps on three sentences; the founder's measure is the quickstart."""

    def train(settings: Fp8 | None) -> float:
        decoder = build_model(tiny_config(), None, seed=2, quantization=settings)
        optimizer = paddle.optimizer.AdamW(3e-3, parameters=decoder.parameters())
        loss = None
        for step in range(120):
            decoder.begin_micro_batch(step=step, micro_batch=0)
            loss = _loss(decoder)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            decoder.end_step()
        return float(loss)

    plain = train(None)
    rounded = train(replace(Fp8(hadamard_block=8, apply_online_actscale_step=20), **changes))
    assert plain < 0.3 and rounded != plain
    assert rounded < plain + 0.15
