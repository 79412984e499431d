from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import safetensors.numpy

from erniekit.errors import ModelFileError
from erniekit.manifest import MANIFEST
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.storage.model_folder import PUBLISHING
from erniekit.model.weights import load_weights, named_weights, save_model_folder, save_weights

from .tiny import logits_of, tiny_config, tiny_model

SHAPES = [{}, {"tie_word_embeddings": False}, {"use_bias": True, "head_dim": 6}]


@pytest.mark.parametrize("shape", SHAPES, ids=["tied", "untied", "bias"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000], ids=["one file", "shards"])
def test_saved_weights_load_bit_for_bit(shape, max_shard_bytes, tmp_path):
    decoder = tiny_model(**shape)
    files = save_weights(decoder, tmp_path, max_shard_bytes)
    assert (len(files) > 2) == (max_shard_bytes == 3000)
    other = tiny_model(seed=9, **shape)
    load_weights(other, tmp_path)
    for (name, ours), theirs in zip(named_weights(decoder).items(), named_weights(other).values(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=name)


def test_files_have_hugging_face_names_and_layout(tmp_path):
    decoder = tiny_model()
    (path,) = save_weights(decoder, tmp_path)
    stored = safetensors.numpy.load_file(path)
    assert {name: values.shape for name, values in stored.items()} == decoder.config.weight_shapes()
    assert "lm_head.weight" not in stored  # tied
    np.testing.assert_array_equal(
        stored["model.layers.1.mlp.down_proj.weight"], decoder.layers[1].mlp.down_proj.weight.numpy().T
    )


def test_shards_hold_what_the_index_says_and_no_more_than_allowed(tmp_path):
    decoder = tiny_model()
    *shards, index_path = save_weights(decoder, tmp_path, 4000)
    index = json.loads(index_path.read_text())
    assert index["metadata"]["total_size"] == 4 * decoder.config.parameter_count()
    assert index["weight_map"].keys() == decoder.config.weight_shapes().keys()
    for path in shards:
        stored = safetensors.numpy.load_file(path)
        assert {name for name, shard in index["weight_map"].items() if shard == path.name} == stored.keys()
        assert sum(values.nbytes for values in stored.values()) <= 4000 or len(stored) == 1


def test_a_folder_that_was_left_half_written_is_refused(tmp_path):
    save_weights(tiny_model(), tmp_path)
    (tmp_path / PUBLISHING).write_text("{}")
    with pytest.raises(ModelFileError, match="half-written"):
        load_weights(tiny_model(), tmp_path)
    (tmp_path / MANIFEST).write_text("{}")  # it comes last
    load_weights(tiny_model(), tmp_path)


def test_an_earlier_save_cut_differently_leaves_nothing_behind(tmp_path):
    for limit in (10**9, 3000, 4000, 10**9):
        decoder = tiny_model(seed=limit)
        written = save_weights(decoder, tmp_path, limit)
        assert set(tmp_path.iterdir()) == set(written)
        again = tiny_model()
        load_weights(again, tmp_path)
        np.testing.assert_array_equal(again.norm.weight.numpy(), decoder.norm.weight.numpy())


def test_equal_weights_give_equal_files(tmp_path):
    for name in ("a", "b"):
        save_model_folder(tiny_model(), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_model_folder_is_complete(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    decoder = tiny_model(bos_token_id=1, eos_token_id=2)
    written = save_model_folder(decoder, tmp_path / "out", [tmp_path / "tokenizer.json"])
    assert {path.name for path in written} == {path.name for path in (tmp_path / "out").iterdir()}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 2
    config = ModelConfig.from_folder(tmp_path / "out")
    assert config == decoder.config
    again = build_model(config, tmp_path / "out")
    np.testing.assert_array_equal(logits_of(again, [1, 2, 3]), logits_of(decoder, [1, 2, 3]))


def test_every_misfit_is_listed_at_once(tmp_path):
    (path,) = save_weights(tiny_model(), tmp_path)
    stored = safetensors.numpy.load_file(path)
    del stored["model.norm.weight"]
    stored["model.layers.0.mlp.up_proj.weight"] = np.zeros((16, 24), np.float32)
    stored["model.layers.7.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    safetensors.numpy.save_file(stored, path)
    with pytest.raises(ModelFileError) as error:
        load_weights(tiny_model(), tmp_path)
    for line in (
        "model.norm.weight: missing",
        "model.layers.0.mlp.up_proj.weight: shape [16, 24], expected [24, 16]",
        "model.layers.7.mlp.up_proj.weight: the model has no such weight (model.safetensors)",
    ):
        assert line in str(error.value)


def test_long_lists_of_misfits_are_cut(tmp_path):
    save_weights(tiny_model(), tmp_path)
    with pytest.raises(ModelFileError, match=r"\.\.\. and \d+ more"):
        load_weights(tiny_model(num_hidden_layers=8), tmp_path)


def test_a_stored_copy_of_tied_weights_is_accepted_only_if_equal(tmp_path):
    decoder = tiny_model()
    (path,) = save_weights(decoder, tmp_path)
    stored = safetensors.numpy.load_file(path)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    safetensors.numpy.save_file(stored, path)
    load_weights(tiny_model(seed=4), tmp_path)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    safetensors.numpy.save_file(stored, path)
    with pytest.raises(ModelFileError, match="tie_word_embeddings"):
        load_weights(tiny_model(), tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "neither model.safetensors nor"),
        ("{", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"weight_map": []}', "not an index of shards"),
        ('{"weight_map": {"a": 5}}', "not a plain file name: '5'"),
        (json.dumps({"weight_map": {"a": "a" * 5000}}), "not a plain file name: 'aaa"),
        ('{"weight_map": {"a": "\\ud800"}}', "not a plain file name"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors: no such file"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a plain file name"),
        ('{"weight_map": {"unknown": "part.safetensors"}}', "unknown: not in part.safetensors"),
    ],
)
def test_unusable_folders_are_explained(index, message, tmp_path):
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    safetensors.numpy.save_file({"a": np.zeros(1, np.float32)}, tmp_path / "part.safetensors")
    with pytest.raises(ModelFileError) as error:
        load_weights(tiny_model(), tmp_path)
    assert message in str(error.value)


def test_weights_that_do_not_fit_are_told_before_memory_is_taken(tmp_path):
    save_weights(tiny_model(), tmp_path)
    with pytest.raises(ModelFileError, match=r"embed_tokens\.weight: shape \[53, 16\], expected \[53, 2000000000\]"):
        build_model(tiny_config(hidden_size=2_000_000_000, head_dim=4), tmp_path)


def test_random_weights_depend_on_seed_and_name_only():
    first, second = (build_model(tiny_config(), None, seed=1) for _ in range(2))
    deeper = build_model(tiny_config(num_hidden_layers=3), None, seed=1)
    other = build_model(tiny_config(), None, seed=2)
    for name, values in named_weights(first).items():
        np.testing.assert_array_equal(values.numpy(), named_weights(second)[name].numpy())
        np.testing.assert_array_equal(values.numpy(), named_weights(deeper)[name].numpy())
        if values.ndim == 2:
            assert not np.array_equal(values.numpy(), named_weights(other)[name].numpy())
            assert float(values.std()) == pytest.approx(0.02, rel=0.2)


def test_the_builder_says_what_it_did(logged):
    build_model(tiny_config(), None, seed=3, hidden_dropout=0.1, log_level=logging.INFO)
    assert [line.split(":")[0] for line in logged] == ["model", "weights", "dropout"]
    assert "4,768" in logged[0] and "seed 3" in logged[1] and "0.1" in logged[2]
