"""Grown vocabularies: which rows are new, what they begin with, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import EMBEDDING, HEAD
from erniekit.model.builder import build_model
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.storage.layouts import open_weights
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.vocabulary import (
    GrownVocabulary,
    already_grown,
    grow,
    grown_size,
    grown_vocabulary,
    vocabulary_weights,
)
from erniekit.model.weights import load_weights, named_weights, save_model_folder, weight_reader

from .tiny import logits_of, tiny_config, tiny_model

IDS = np.arange(24) % 53
FAMILIES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "qwen2, untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "gemma3": {"model_type": "gemma3_text"},
    "mixture of experts": {"model_type": "qwen2_moe", "tie_word_embeddings": False},
}


def stored(folder, **shape):
    """A tiny model on disk, and its decoder."""
    decoder = tiny_model(**shape)
    save_model_folder(decoder, folder)
    return decoder


def grown(config, first=53, count=10, **how):
    return grow(config, grown_vocabulary(config, first, count, **how))


@pytest.mark.parametrize(
    ("old", "tokens", "size"), [(53, 54, 64), (53, 64, 64), (53, 65, 128), (64, 60, 64), (53, 53, 53), (100, 90, 100)]
)
def test_a_model_grows_to_the_next_multiple_of_64_only_if_it_has_to(old, tokens, size):
    assert grown_size(old, tokens) == size


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init", ["normal", "mean"])
def test_old_logits_are_equal_to_the_bit(family, init, tmp_path):
    """Before and after growth, for the same ids, whatever the new rows are."""
    before = stored(tmp_path, **FAMILIES[family])
    after = build_model(grown(ModelConfig.from_folder(tmp_path), init=init), tmp_path, seed=3)
    logits = logits_of(after, IDS)
    assert logits.shape[1] == 64
    np.testing.assert_array_equal(logits[:, :53], logits_of(before, IDS))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_grown_weight(tied, tmp_path):
    before = named_weights(stored(tmp_path, tie_word_embeddings=tied))
    config = ModelConfig.from_folder(tmp_path)
    names = (EMBEDDING,) if tied else (EMBEDDING, HEAD)
    assert vocabulary_weights(config) == names
    drawn = {}
    for init in ("normal", "mean"):
        weights = named_weights(build_model(grown(config, init=init, seed=7), tmp_path))
        assert all(np.array_equal(weights[name], before[name]) for name in weights if name not in names)
        for name in names:
            old, new = before[name].numpy(), weights[name].numpy()
            mean = old.astype(np.float64).mean(0).astype(np.float32)
            np.testing.assert_array_equal(new[:53], old)
            np.testing.assert_array_equal(new[63:], mean[None])  # of no token
            if init == "mean":
                np.testing.assert_array_equal(new[53:63], np.tile(mean, (10, 1)))
            else:
                drawn[name] = new[53:63]
                assert 0.012 < drawn[name].std() < 0.028  # initializer_range 0.02
    if not tied:
        assert not np.array_equal(drawn[EMBEDDING], drawn[HEAD])
    again = named_weights(build_model(grown(config, seed=7), tmp_path, seed=99))
    other = named_weights(build_model(grown(config, seed=8), tmp_path))
    np.testing.assert_array_equal(again[EMBEDDING][53:63], drawn[EMBEDDING])
    assert not np.array_equal(other[EMBEDDING][53:63], drawn[EMBEDDING])


def test_new_tokens_in_rows_that_no_token_had(tmp_path):
    """The files have 53 rows, the tokenizer 40 tokens: no row is added, the rows behind the new ones stay."""
    before = stored(tmp_path)
    config = grown(ModelConfig.from_folder(tmp_path), first=40, count=6, init="mean")
    assert config.vocab_size == 53
    old = named_weights(before)[EMBEDDING].numpy()
    new = named_weights(build_model(config, tmp_path))[EMBEDDING].numpy()
    np.testing.assert_array_equal(new[:40], old[:40])
    np.testing.assert_array_equal(new[46:], old[46:])
    np.testing.assert_allclose(new[40:46], np.tile(old[:40].mean(0), (6, 1)), atol=1e-7)


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_tensor_parallel_ranks(rank, tmp_path):
    stored(tmp_path, tie_word_embeddings=False, vocab_size=52)
    config = grown(ModelConfig.from_folder(tmp_path), first=50, count=9)
    whole, own = build_model(config, tmp_path), build_model(config, None, tp=TensorParallel(rank, 2))
    load_weights(own, tmp_path)
    for name in (EMBEDDING, HEAD):
        half = named_weights(whole)[name].numpy()[32 * rank : 32 * (rank + 1)]
        np.testing.assert_array_equal(named_weights(own)[name].numpy(), half)


def test_a_head_that_files_have_transposed_grows_along_the_other_axis(tmp_path):
    """Paddle's libraries store an untied head as [H, V]."""
    plain, paddle_files = tmp_path / "hf", tmp_path / "paddle"
    decoder = stored(plain, model_type="qwen2", tie_word_embeddings=False)
    config = decoder.config
    from erniekit.model.storage.safetensors import write_safetensors

    reader = open_weights(config, plain)
    tensors = {
        name.replace("model.", "qwen2.", 1): np.ascontiguousarray(
            reader.read(name).T if config.architecture.is_linear(name) or name == HEAD else reader.read(name)
        )
        for name in config.weight_shapes()
    }
    paddle_files.mkdir()
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(paddle_files / "model.safetensors", shapes, tensors.items(), {"format": "pd"}, np.float32)
    for init in ("normal", "mean"):
        larger = grown(config, init=init)
        one, other = (named_weights(build_model(larger, folder)) for folder in (plain, paddle_files))
        for name in one:
            np.testing.assert_allclose(one[name], other[name], atol=1e-7)
        np.testing.assert_allclose(
            weight_reader(larger, plain)(HEAD), weight_reader(larger, paddle_files)(HEAD), atol=1e-7
        )


def test_random_weights_of_a_grown_model():
    config = tiny_config()
    before, after = (named_weights(build_model(each, None, seed=5)) for each in (config, grown(config, init="mean")))
    np.testing.assert_array_equal(after[EMBEDDING][:53], before[EMBEDDING])
    np.testing.assert_allclose(after[EMBEDDING][53:], np.tile(before[EMBEDDING].numpy().mean(0), (11, 1)), atol=1e-7)
    assert all(np.array_equal(after[name], before[name]) for name in before if name != EMBEDDING)


def test_beside_quantized_weights(tmp_path):
    stored(tmp_path, hidden_size=64, intermediate_size=64, head_dim=16)
    config = ModelConfig.from_folder(tmp_path)
    before, after = (
        build_model(each, tmp_path, quantization=WeightOnly("weight_only_int8")) for each in (config, grown(config))
    )
    np.testing.assert_array_equal(logits_of(after, IDS)[:, :53], logits_of(before, IDS))


def test_a_saved_grown_model_is_read_as_it_is(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    stored(old, tie_word_embeddings=False)
    config = grown(ModelConfig.from_folder(old))
    decoder = build_model(config, old)
    save_model_folder(decoder, new)
    found = ModelConfig.from_folder(new)
    assert found.vocab_size == 64 and found == already_grown(config)
    again = named_weights(build_model(found, new))
    assert all(np.array_equal(again[name], weight) for name, weight in named_weights(decoder).items())
    with pytest.raises(ModelFileError, match=r"embed_tokens.weight: shape \[64, 16\], expected \[53, 16\]"):
        build_model(config, new)  # it would draw its trained rows anew


def test_the_facts_in_words():
    vocabulary = grown_vocabulary(tiny_config(), 53, 10)
    assert vocabulary == GrownVocabulary(53, 10, 53, 64) and vocabulary.ids == range(53, 63)
    assert str(vocabulary) == "10 new tokens, ids 53 to 62, 53 rows -> 64, new rows normal"
    inside = replace(vocabulary, first=40, count=1, size=53, init="mean")
    assert str(inside) == "1 new token, ids 40 to 40, 53 rows, new rows mean"
