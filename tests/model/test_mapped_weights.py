"""Models whose weights stay in their files compute what others do, and leave the files as they are."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy

from erniekit.errors import ModelFileError, UserError
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.lora.fingerprint import weights_fingerprint
from erniekit.model.mapped_weights import MappedWeight, rows_by_name
from erniekit.model.storage.precision import to_stored
from erniekit.model.storage.safetensors import SafetensorsFile, write_stored
from erniekit.model.storage.safetensors_header import StoredTensor
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.weights import named_linears, named_weights, save_weights
from erniekit.native import library

from .tiny import EXPERTS, logits_of, pack, tiny_config, tiny_model

IDS = [5, 9, 2, 44, 17, 30, 8]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "use_bias": True},
    "experts": EXPERTS,
    "deepseek_v3": {"model_type": "deepseek_v3"},
}


def folder_of(decoder: Decoder, folder: Path, dtype: str = "F32") -> Path:
    (path,) = save_weights(decoder, folder)
    if dtype != "F32":
        file = SafetensorsFile(path)
        halves = {name: to_stored(name, file.read(name), dtype) for name in file.names()}
        specs = {name: StoredTensor(dtype, values.shape) for name, values in halves.items()}
        contents = ((name, [values.data]) for name, values in halves.items())
        write_stored(path, specs, contents, {"format": "pt"})
    return folder


def answers(decoder: Decoder) -> list[list[int]]:
    return generate(decoder, [IDS, IDS[:3]], Sampling(max_new_tokens=12))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mapped_model_computes_what_another_does(tmp_path: Path, shape: str, dtype: str) -> None:
    config = tiny_config(**SHAPES[shape])
    folder = folder_of(tiny_model(**SHAPES[shape]), tmp_path, dtype)
    plain, mapped = (build_model(config, folder, mapped=each) for each in (False, True))
    count = sum(isinstance(linear.product, MappedWeight) for linear in named_linears(mapped).values())
    assert count > 0 and set(named_weights(mapped)) < set(named_weights(plain))
    with paddle.no_grad():
        np.testing.assert_allclose(logits_of(mapped, IDS), logits_of(plain, IDS), rtol=0, atol=2e-5)
    assert answers(mapped) == answers(plain)
    assert weights_fingerprint(mapped) == weights_fingerprint(plain)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mapped_reward_model_scores_as_another_does(tmp_path: Path, shape: str, dtype: str) -> None:
    config = replace(tiny_config(**SHAPES[shape]), scored=True)
    folder = folder_of(build_model(config, None, seed=3), tmp_path, dtype)
    plain, mapped = (build_model(config, folder, mapped=each) for each in (False, True))
    assert set(rows_by_name(mapped)) == {"model.embed_tokens.weight"}
    with paddle.no_grad():
        scores, expected = (each.head(each(*pack(IDS, [len(IDS)]))[0]).numpy() for each in (mapped, plain))
    assert scores.shape == (len(IDS),)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-7)
    assert weights_fingerprint(mapped) == weights_fingerprint(plain)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_file_keeps_its_values_whatever_is_written_to_the_model(tmp_path: Path, dtype: str) -> None:
    folder = folder_of(tiny_model(), tmp_path, dtype)
    (path,) = folder.glob("*.safetensors")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    decoder = build_model(tiny_config(), folder, mapped=True)
    for mapped in (decoder.embedding.mapped, decoder.layers[0].mlp.down_proj.product):
        mapped.weight.set_value(paddle.zeros_like(mapped.weight))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    other = build_model(tiny_config(), folder, mapped=True)
    assert float(other.embedding.mapped.dense().abs().sum()) > 0


def dtypes_of(decoder: Decoder) -> set[Any]:
    linears = [linear.product.weight for linear in named_linears(decoder).values()]
    return {weight.dtype for weight in [decoder.embedding.mapped.weight, *linears]}


@pytest.mark.usefixtures("native_kernels")
def test_bfloat16_stays_as_it_is_where_kernels_compute_with_it(tmp_path: Path) -> None:
    folder = folder_of(tiny_model(), tmp_path, "BF16")
    decoder = build_model(tiny_config(), folder, mapped=True)
    assert dtypes_of(decoder) == {paddle.bfloat16}
    ids = paddle.to_tensor([[3, 5]])
    rows = decoder.embedding(ids)
    assert rows.dtype == paddle.float32
    np.testing.assert_array_equal(rows.numpy(), build_model(tiny_config(), folder).embedding(ids).numpy())


def test_bfloat16_is_read_where_no_kernel_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tiny_model(), tmp_path, "BF16")
    expected = logits_of(build_model(tiny_config(), folder), IDS)
    monkeypatch.setattr(library, "kernels", lambda: library.Kernels(library.PADDLE, "for this test"))
    decoder = build_model(tiny_config(), folder, mapped=True)
    assert {weight.dtype for weight in named_weights(decoder).values()} == {paddle.float32}
    np.testing.assert_allclose(logits_of(decoder, IDS), expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_a_product_with_bfloat16_is_that_of_its_values(shape: tuple[int, ...]) -> None:
    paddle.seed(0)
    weight = paddle.randn([7, shape[-1]]).astype("bfloat16")
    x, mapped = paddle.randn([*shape]), MappedWeight(weight)
    expected = paddle.matmul(x, weight.astype("float32"), transpose_y=True).numpy()
    np.testing.assert_allclose(mapped(x).numpy(), expected, rtol=0, atol=1e-6)
    turned = x.T if len(shape) == 2 else x  # with gaps between its numbers
    back = turned.T if len(shape) == 2 else turned
    np.testing.assert_allclose(mapped(back).numpy(), expected, rtol=0, atol=1e-6)
    x.stop_gradient = False
    mapped(x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(mapped.dense().sum(0).numpy(), shape), rtol=0, atol=1e-6)


def test_a_file_that_is_replaced_changes_nothing(tmp_path: Path) -> None:
    folder = folder_of(tiny_model(), tmp_path / "model")
    decoder = build_model(tiny_config(), folder, mapped=True)
    expected = logits_of(decoder, IDS)
    (path,) = folder.glob("*.safetensors")
    (new,) = save_weights(tiny_model(seed=5), tmp_path / "new")
    new.replace(path)
    np.testing.assert_array_equal(logits_of(decoder, IDS), expected)


def test_ranks_that_divide_a_model_read_their_parts(tmp_path: Path) -> None:
    folder = folder_of(tiny_model(vocab_size=52), tmp_path)
    decoder = build_model(tiny_config(vocab_size=52), folder, mapped=True, tp=TensorParallel(size=2, rank=1))
    assert not any(isinstance(linear.product, MappedWeight) for linear in named_linears(decoder).values())


def test_values_that_are_not_finite_are_told_with_the_first_answer(tmp_path: Path) -> None:
    folder = folder_of(tiny_model(), tmp_path)
    (path,) = folder.glob("*.safetensors")
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = np.nan
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(ModelFileError, match="NaN"):
        build_model(tiny_config(), folder)
    with pytest.raises(UserError, match="logits are not finite"):
        answers(build_model(tiny_config(), folder, mapped=True))
