"""Frozen weights in few bits, in whole decoders: the same as dense ones that hold the values of the codes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from erniekit.errors import ConfigurationError
from erniekit.model.autograd import autocast_operand
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import load_adapters, merge_adapters, named_adapter_weights, save_adapters
from erniekit.model.quantization.codes import dequantize, quantize
from erniekit.model.quantization.formats import INT4, INT8, NF4
from erniekit.model.quantization.packed import PackedWeight
from erniekit.model.quantization.settings import WEIGHT_ONLY, WeightOnly
from erniekit.model.recompute import Recompute
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.weights import named_linears, named_weights, packed_weights, save_model_folder

from ..tiny import EXPERTS, logits_of, pack, tiny_config, tiny_model

IDS = [5, 9, 2, 40, 17, 3, 8]
UNTIED_EXPERTS = {**EXPERTS, "tie_word_embeddings": False}
LORA = LoraSettings(rank=2, alpha=4.0)


@pytest.fixture(scope="module", params=[{}, UNTIED_EXPERTS], ids=["dense", "experts"])
def folder(request, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("base")
    save_model_folder(tiny_model(seed=3, **request.param), target)
    return target


def _config(folder: Path):
    from erniekit.model.architectures.model_config import ModelConfig

    return ModelConfig.from_folder(folder)


def _rounded(folder: Path, algorithm: str, **changes):
    """The plain decoder of a folder whose linear weights hold what their codes stand for."""
    decoder = build_model(_config(folder), folder, **changes)
    for path, linear in named_linears(decoder).items():
        form = WeightOnly(algorithm).form(path, decoder.config.architecture)
        linear.weight.set_value(dequantize(quantize(linear.weight.numpy().T, form), form).T.copy())
    return decoder


def _loss(decoder) -> paddle.Tensor:
    logits = decoder.head(decoder(*pack(IDS, [4, 7])))
    return paddle.nn.functional.cross_entropy(logits[0], paddle.to_tensor([*IDS[1:], 1]))


def _gradients(decoder, **changes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    for parameter in named_adapter_weights(decoder).values():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32) * 0.1)
    _loss(decoder).backward()
    reached = {name: each for name, each in named_adapter_weights(decoder).items() if each.grad is not None}
    assert len(reached) > 20  # experts that no token reaches have none
    return {name: parameter.grad.numpy() for name, parameter in reached.items()}


@pytest.mark.parametrize("algorithm", WEIGHT_ONLY)
def test_losses_and_gradients_are_those_of_the_values_that_codes_stand_for(folder: Path, algorithm: str) -> None:
    settings = WeightOnly(algorithm)
    packed = build_model(_config(folder), folder, lora=LORA, quantization=settings)
    plain = _rounded(folder, algorithm)
    assert not [name for name in named_weights(packed) if name.endswith("_proj.weight")]
    assert packed_weights(packed).keys() == {f"{path}.weight" for path in named_linears(plain)}
    np.testing.assert_allclose(logits_of(packed, IDS), logits_of(plain, IDS), rtol=1e-4, atol=1e-5)
    save = folder / f"rounded-{algorithm}"
    save_model_folder(plain, save)
    beside_plain = build_model(plain.config, save, lora=LORA)
    expected = _gradients(beside_plain)
    for name, gradient in _gradients(packed).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_formats_of_a_mixture() -> None:
    decoder = build_model(tiny_config(**UNTIED_EXPERTS), None, quantization=WeightOnly("weight_only_mix"), lora=LORA)
    forms = {name: weight.form for name, weight in packed_weights(decoder).items()}
    assert {form for name, form in forms.items() if ".experts." in name} == {INT4}
    assert {form for name, form in forms.items() if ".experts." not in name} == {INT8}
    assert any(".shared_experts." in name for name in forms)


def test_no_dense_copy_is_held(folder: Path) -> None:
    packed = build_model(_config(folder), folder, lora=LORA, quantization=WeightOnly("nf4"))
    _loss(packed).backward()
    for linear in named_linears(packed).values():
        assert linear.weight is None
        held = [*linear.product.buffers(), *linear.product.parameters()]
        assert {str(buffer.dtype) for buffer in held} == {"paddle.uint8", "paddle.float32"}
        assert sum(buffer.size for buffer in held) < linear.product.values


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(folder: Path, reentrant: bool) -> None:
    def gradients(recompute: Recompute | None) -> dict[str, np.ndarray]:
        settings = WeightOnly("weight_only_mix")
        decoder = build_model(_config(folder), folder, lora=LORA, quantization=settings, recompute=recompute)
        return _gradients(decoder)

    plain = gradients(None)
    for name, gradient in gradients(Recompute(reentrant)).items():
        np.testing.assert_array_equal(gradient, plain[name], err_msg=name)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_merge_onto_the_values_that_codes_stand_for(folder: Path, dora: bool) -> None:
    lora = LoraSettings(rank=2, alpha=4.0, dora=dora, target_modules=("*_proj",) if dora else ("q_proj", "up_proj"))
    packed = build_model(_config(folder), folder, lora=lora, quantization=WeightOnly("weight_only_int4"))
    for parameter in named_adapter_weights(packed).values():
        parameter.set_value(paddle.full(parameter.shape, 0.05))
    expected = logits_of(packed, IDS)
    merge_adapters(packed)
    assert not packed_weights(packed)
    assert all(name in named_weights(packed) for name in packed.config.weight_shapes())
    np.testing.assert_allclose(logits_of(packed, IDS), expected, rtol=1e-4, atol=1e-4)


def test_adapters_know_the_rounded_base_they_were_trained_beside(folder: Path, tmp_path: Path) -> None:
    config, settings = _config(folder), WeightOnly("nf4")
    save_adapters(build_model(config, folder, lora=LORA, quantization=settings), tmp_path, str(folder))
    assert load_adapters(build_model(config, folder, quantization=settings), tmp_path)
    assert load_adapters(_rounded(folder, "nf4"), tmp_path)
    assert not load_adapters(build_model(config, folder), tmp_path)
    assert not load_adapters(build_model(config, folder, quantization=WeightOnly("weight_only_int8")), tmp_path)


def test_pissa_is_refused(folder: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4.0, init="pissa")
    with pytest.raises(ConfigurationError, match="PiSSA"):
        build_model(_config(folder), folder, lora=lora, quantization=WeightOnly("nf4"))


@pytest.mark.parametrize("cut", ["inputs", "outputs"])
@pytest.mark.parametrize("form", [INT8, INT4, NF4], ids=lambda form: form.name)
def test_ranks_have_slices_of_the_whole_and_its_scales(form, cut: str) -> None:
    values = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    values[:, 3] = 5.0  # would be no part of the scales of the second rank's inputs
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = dequantize(quantize(values, form), form)
    parts = []
    for rank in range(2):
        weight = PackedWeight(form, paddle.float32)
        weight.fill(name, values, TensorParallel(rank, 2), axis=0 if cut == "inputs" else 1)
        parts.append(weight.dense().numpy())
    np.testing.assert_allclose(np.concatenate(parts, 1 if cut == "inputs" else 0), whole, rtol=1e-6)


def test_a_product_has_the_precision_of_its_activations() -> None:
    weight = PackedWeight(NF4, paddle.float32)
    weight.fill("q_proj.weight", np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32), TensorParallel())
    x = np.random.default_rng(1).standard_normal((3, 64))
    narrow, wide = (weight(paddle.to_tensor(x.astype(dtype)), None) for dtype in (np.float32, np.float64))
    assert (narrow.dtype, wide.dtype) == (paddle.float32, paddle.float64)
    np.testing.assert_allclose(wide.numpy(), narrow.numpy(), rtol=1e-4, atol=1e-5)


def test_mixed_precision_reaches_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no 16 bits, so 64 stand for them in what Paddle says of the context."""
    x = paddle.ones([2, 3])
    assert autocast_operand(x) is x
    amp = SimpleNamespace(_amp_level=paddle.base.core.AmpLevel.O1, _amp_dtype="float64")
    monkeypatch.setattr(paddle.base.framework, "_dygraph_tracer", lambda: amp)
    assert autocast_operand(x).dtype == paddle.float64
