"""Models whose weights stay in their files compute what others do, and leave the files as they are."""

from __future__ import annotations

import hashlib
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
from erniekit.model.mapped_weights import MappedWeight
from erniekit.model.storage.safetensors import SafetensorsFile, write_stored
from erniekit.model.storage.safetensors_header import StoredTensor
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.weights import named_linears, named_weights, save_weights

from .tiny import EXPERTS, logits_of, tiny_config, tiny_model

IDS = [5, 9, 2, 44, 17, 30, 8]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "use_bias": True},
    "experts": EXPERTS,
    "deepseek_v3": {"model_type": "deepseek_v3"},
}


def folder_of(decoder: Decoder, folder: Path, dtype: str = "float32") -> Path:
    (path,) = save_weights(decoder, folder)
    if dtype != "float32":
        file = SafetensorsFile(path)
        halves = {name: file.read(name).view(np.uint32) >> 16 for name in file.names()}
        specs = {name: StoredTensor("BF16", values.shape) for name, values in halves.items()}
        contents = ((name, [values.astype(np.uint16).data]) for name, values in halves.items())
        write_stored(path, specs, contents, {"format": "pt"})
    return folder


def answers(decoder: Decoder) -> list[list[int]]:
    return generate(decoder, [IDS, IDS[:3]], Sampling(max_new_tokens=12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_a_file_keeps_its_values_whatever_is_written_to_the_model(tmp_path: Path) -> None:
    folder = folder_of(tiny_model(), tmp_path)
    (path,) = folder.glob("*.safetensors")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    decoder = build_model(tiny_config(), folder, mapped=True)
    decoder.embedding.weight.set_value(paddle.zeros_like(decoder.embedding.weight))
    product = decoder.layers[0].mlp.down_proj.product
    product.weight.set_value(paddle.zeros_like(product.weight))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    other = build_model(tiny_config(), folder, mapped=True)
    assert float(other.embedding.weight.abs().sum()) > 0


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
