"""Weights of codecs: both spellings of weight norm, shards, and folders that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from erniekit.codecs.weights import CodecWeights
from erniekit.errors import ModelFileError
from erniekit.model.storage.safetensors import write_safetensors


def _write(folder: Path, tensors: dict[str, np.ndarray], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / file, {name: values.shape for name, values in tensors.items()}, tensors.items())
    return folder


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("length", "direction"),
    [("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1")],
)
@pytest.mark.parametrize("axis", [0, 2])
def test_weight_norm_is_folded(tmp_path: Path, length: str, direction: str, axis: int) -> None:
    v = _random(4, 3, 5)
    g = _random(*[size if index == axis else 1 for index, size in enumerate(v.shape)])
    weights = CodecWeights(_write(tmp_path, {f"a.{length}": g, f"a.{direction}": v}))
    others = tuple(index for index in range(3) if index != axis)
    expected = g * v / np.sqrt((v.astype(float) ** 2).sum(others, keepdims=True))
    assert "a.weight" in weights and "b.weight" not in weights
    np.testing.assert_allclose(weights.take("a.weight", 4, 3, 5), expected, rtol=1e-6)
    weights.refuse_others("")


def test_shards_are_read_and_the_digest_tells_values_not_files(tmp_path: Path) -> None:
    one, two = _random(4, 3), _random(5)
    whole = CodecWeights(_write(tmp_path / "whole", {"one": one, "two": two}))
    sharded = tmp_path / "sharded"
    _write(sharded, {"one": one}, "model-00001-of-00002.safetensors")
    _write(sharded, {"two": two}, "model-00002-of-00002.safetensors")
    index = {"weight_map": {"one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    shards = CodecWeights(sharded)
    other = CodecWeights(_write(tmp_path / "other", {"one": one, "two": two + 1}))
    for weights in (whole, shards, other):
        np.testing.assert_array_equal(weights.take("one", 4, 3), one)
        weights.take("two", 5)
    assert whole.digest == shards.digest != other.digest


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = {"a": _random(2, 3), "c.weight_g": _random(2, 1), "c.weight_v": _random(3, 2), "bad": _random(2) * np.nan}
    zero = {"z.weight_g": _random(2, 1), "z.weight_v": np.zeros((2, 3), np.float32)}
    weights = CodecWeights(_write(tmp_path, tensors | zero))
    for name, shape, message in (
        ("b", (2,), "lack b, which config.json asks for"),
        ("a", (3, 2), r"a has shape \[2, 3\]; config.json asks for \[3, 2\]"),
        ("c.weight", (3, 2), r"c.weight: lengths \[2, 1\] and directions \[3, 2\] make no weight"),
        ("z.weight", (2, 3), "z.weight: .* a direction is zero"),
        ("bad", (2,), "bad: 2 of 2 values read are NaN"),
    ):
        with pytest.raises(ModelFileError, match=message):
            weights.take(name, *shape)
    with pytest.raises(ModelFileError, match=r"has no place for\n  c.weight_g"):
        CodecWeights(tmp_path).refuse_others("a|z.*|bad")
    with pytest.raises(ModelFileError, match=r"contains neither model\.safetensors"):
        CodecWeights(tmp_path / "nowhere")
