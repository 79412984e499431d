"""A plain decoder read as a model that writes codes: its weights to the bit, the rest from the seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from erniekit.model.architectures.model_config import ModelConfig, WrappedDecoder
from erniekit.model.architectures.speaking import decoder_names
from erniekit.model.builder import build_model
from erniekit.model.initial_weights import initial_weight
from erniekit.model.storage.layouts import locate_weights, open_weights
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.vocabulary import grow, grown_vocabulary
from erniekit.model.weights import named_weights, save_model_folder

from ..tiny import tiny_model
from ..tiny_speech import OMNIVOICE, VALL_E

SEED = 7
LLAMA = {"model_type": "llama", "tie_word_embeddings": False}


def wrapped(plain: ModelConfig, outer: dict) -> ModelConfig:
    config = ModelConfig.from_json({**outer, "llm_config": plain.to_json()})
    return replace(config, wrapped=WrappedDecoder(plain, SEED))


@pytest.fixture(params=[OMNIVOICE, VALL_E], ids=["omnivoice", "vall_e"])
def outer(request):
    return request.param


@pytest.fixture(params=[LLAMA, {"model_type": "olmo2"}, {}], ids=["llama", "olmo2", "ernie"])
def folder(request, tmp_path):
    decoder = tiny_model(**request.param)
    save_model_folder(decoder, tmp_path)
    return tmp_path, decoder


def test_the_decoder_is_the_files_to_the_bit_and_codes_are_drawn(folder, outer):
    path, plain = folder
    config = wrapped(plain.config, outer)
    found = named_weights(build_model(config, path, seed=1))
    assert list(found) == list(config.weight_shapes())
    stored, names = named_weights(plain), decoder_names(config)
    for name, weight in found.items():
        expected = (
            stored[names[name]].numpy()
            if name in names
            else initial_weight(name, config.weight_shapes()[name], config, SEED)
        )
        np.testing.assert_array_equal(weight.numpy(), expected, err_msg=name)
    assert set(names.values()) == {*stored} - {"lm_head.weight"}


def test_what_is_drawn_is_read_in_any_pieces(folder, outer):
    path, plain = folder
    config = wrapped(plain.config, outer)
    weights = open_weights(config, path)
    name = next(iter(config.weight_shapes()))
    whole = weights.read(name)
    pieces = [values.copy() for _, values in weights.row_blocks(name, range(3, 9))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole[3:9])
    assert weights.dtype(name) == "F32" and weights.shape(name) == config.weight_shapes()[name]
    assert weights.matrix(name) is None and not weights.is_transposed(name)


def test_tensor_parallel_ranks_have_their_slices(folder, outer):
    path, plain = folder
    config = wrapped(plain.config, {**outer})
    if config.vocab_size % 2:
        config = grow(config, grown_vocabulary(config, config.vocab_size, 3, seed=SEED))
    whole = named_weights(build_model(config, path))
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        for name, weight in named_weights(build_model(config, path, tp=tp)).items():
            axis = config.architecture.placement(name).axis
            np.testing.assert_array_equal(weight.numpy(), tp.local_shard(whole[name].numpy(), axis), err_msg=name)


def test_new_tokens_grow_the_wrapped_model(folder, outer):
    path, plain = folder
    config = wrapped(plain.config, outer)
    larger = grow(config, grown_vocabulary(config, config.vocab_size, 4, seed=SEED))
    before, after = (named_weights(build_model(each, path)) for each in (config, larger))
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name].numpy()[: weight.shape[0]], weight.numpy(), err_msg=name)
    embedding = config.architecture.file_name("model.embed_tokens.weight")
    assert after[embedding].shape[0] == 64
    assert locate_weights(larger, path).shape(embedding) == (64, 16)
