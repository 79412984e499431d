"""Rows of new tokens beside adapters: gradients, files, merging, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from erniekit.errors import ModelFileError
from erniekit.model import head as head_module
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import EMBEDDING, HEAD
from erniekit.model.builder import build_model
from erniekit.model.head import token_log_probabilities, token_loss
from erniekit.model.lora.config import LoraSettings, adapter_parameter_count, adapter_shapes
from erniekit.model.lora.folder import ADAPTER_CONFIG_FILE
from erniekit.model.lora.lora import (
    base_fingerprint,
    describe_adapters,
    merge_adapters,
    named_adapter_weights,
    named_trainable_parameters,
    save_adapters,
    without_adapters,
)
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.lora.trainable_tokens import adapter_vocabulary
from erniekit.model.new_rows import place_rows
from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.model.vocabulary import grow, grown_vocabulary
from erniekit.model.weights import named_weights, save_model_folder

from ..tiny import logits_of, pack, tiny_config, tiny_model

IDS = np.arange(40) * 7 % 63  # new tokens among them
LABELS = np.where(np.arange(40) % 5 == 0, -100, np.roll(IDS, -1))
SETTINGS = {"LoRA": LoraSettings(2, 4.0), "rsLoRA and DoRA": LoraSettings(2, 4.0, rslora=True, dora=True)}
EMBEDDING_ROWS, HEAD_ROWS = "model.embed_tokens.new_rows", "lm_head.new_rows"
HEADS = [{}, {"sparse": True}, {"fused": True}]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path):
    """The folder of a model with 53 tokens."""
    save_model_folder(tiny_model(tie_word_embeddings=request.param), tmp_path / "base")
    return tmp_path / "base"


def grown(base, count=10, **how):
    config = ModelConfig.from_folder(base)
    return grow(config, grown_vocabulary(config, 53, count, **how))


def adapted(base, settings=SETTINGS["LoRA"], **how):
    """New adapters, moved away from their start, and the rows of new tokens."""
    model = build_model(grown(base, **how), base, lora=settings, seed=1)
    rng = np.random.default_rng(2)
    for parameter in named_adapter_weights(model).values():
        if not parameter.stop_gradient:
            noise = rng.standard_normal(parameter.shape).astype(np.float32) * 0.2
            parameter.set_value(parameter.numpy() + noise)
    return model


def gradients(model, weights, compute):
    model.clear_gradients()
    model.randomness.set(step=3, micro_batch=1)
    compute(model, model(*pack(IDS, [15, 40]))).backward()
    return {name: weight.grad.numpy() for name, weight in weights(model).items() if weight.grad is not None}


def loss(**head):
    def compute(model, hidden):
        return token_loss(model, hidden, paddle.to_tensor(LABELS[None]), **head).loss_sum * 0.125

    return compute


def log_probabilities(**head):
    def compute(model, hidden):
        values = token_log_probabilities(model, hidden, paddle.to_tensor(LABELS[None]), **head).values
        return (values * paddle.linspace(-1.0, 2.0, values.shape[0])).sum()

    return compute


@pytest.mark.parametrize("head", HEADS, ids=["plain", "sparse", "fused"])
@pytest.mark.parametrize("measure", [loss, log_probabilities])
@pytest.mark.parametrize("chunk_logits", [10**9, 64 * 7])
def test_gradients_are_those_of_the_rows_of_the_whole_matrix(base, head, measure, chunk_logits, monkeypatch):
    """Merged and trained in full, the same model has the same gradients in these rows."""
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", chunk_logits)
    model, whole = adapted(base), adapted(base)
    merge_adapters(whole)
    own = gradients(model, named_trainable_parameters, measure(**head))
    expected = gradients(whole, named_weights, measure())
    tied = whole.config.tie_word_embeddings
    assert (EMBEDDING_ROWS in own, HEAD_ROWS in own) == (True, not tied)
    for name, of_weight in ((EMBEDDING_ROWS, EMBEDDING), (HEAD_ROWS, HEAD))[: 1 if tied else 2]:
        rows = expected[of_weight][53:63]
        np.testing.assert_allclose(own[name], rows, atol=3e-5 * np.abs(rows).max())
    assert not any(parameter.grad is not None for parameter in named_weights(model).values())


def test_logits_are_those_of_the_merged_model(base):
    model, merged = adapted(base), adapted(base)
    merge_adapters(merged)
    np.testing.assert_allclose(logits_of(model, IDS), logits_of(merged, IDS), atol=2e-5)
    assert not any("new_rows" in name for name, _ in merged.named_parameters())


def test_new_rows_begin_as_those_of_the_weight_and_are_switched_off_with_the_adapters(base):
    """So the reference of a preference loss without adapters is the model that the run started from."""
    plain = build_model(grown(base), base)
    fresh = build_model(grown(base), base, lora=SETTINGS["LoRA"])
    np.testing.assert_array_equal(logits_of(fresh, IDS), logits_of(plain, IDS))
    model = adapted(base)
    assert np.abs(logits_of(model, IDS) - logits_of(plain, IDS)).max() > 0.01
    with without_adapters(model):
        np.testing.assert_array_equal(logits_of(model, IDS), logits_of(plain, IDS))


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_folder_is_read_as_it_was_written(base, kind, tmp_path):
    model = adapted(base, SETTINGS[kind])
    save_adapters(model, tmp_path / "adapters", str(base))
    again = build_model(ModelConfig.from_folder(base), base, adapters=tmp_path / "adapters", seed=99)
    assert again.config.vocab_size == 64  # grown by the folder alone
    np.testing.assert_array_equal(logits_of(again, IDS), logits_of(model, IDS))
    assert base_fingerprint(again) == base_fingerprint(model)
    first, second = named_adapter_weights(model), named_adapter_weights(again)
    assert list(first) == list(second) and all(np.array_equal(first[name], second[name]) for name in first)
    resumed = build_model(grown(base), base, lora=SETTINGS[kind], adapters=tmp_path / "adapters")
    np.testing.assert_array_equal(logits_of(resumed, IDS), logits_of(model, IDS))


def test_the_folder_has_pefts_form(base, tmp_path):
    model = adapted(base)
    tied = model.config.tie_word_embeddings
    save_adapters(model, tmp_path, str(base))
    ids = json.loads((tmp_path / ADAPTER_CONFIG_FILE).read_text())["trainable_token_indices"]
    names = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    assert ids == {name: list(range(53, 63)) for name in names}
    file = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    own = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    np.testing.assert_array_equal(file.read(own), named_adapter_weights(model)[EMBEDDING_ROWS])
    assert ("base_model.model.lm_head.token_adapter.trainable_tokens_delta" in file.names()) == (not tied)
    assert all(name.startswith("base_model.model.") for name in file.names())


def test_merging_files_tensor_by_tensor(base, tmp_path):
    model = adapted(base)
    save_adapters(model, tmp_path, str(base))
    stored = read_adapters(tmp_path, model.config)
    plain = {name: weight.numpy() for name, weight in named_weights(build_model(grown(base), base)).items()}
    merge_adapters(model)
    for name in (EMBEDDING, HEAD)[: 1 if model.config.tie_word_embeddings else 2]:
        np.testing.assert_array_equal(stored.merge(name, plain[name]), named_weights(model)[name])


def test_frozen_rows_are_saved_and_not_trained(base, tmp_path):
    model = adapted(base, trained=False)
    start = named_weights(build_model(grown(base), base))[EMBEDDING][53:63].numpy()
    rows = named_adapter_weights(model)[EMBEDDING_ROWS]
    assert rows.stop_gradient and np.array_equal(rows, start)
    assert EMBEDDING_ROWS not in gradients(model, named_trainable_parameters, loss())
    assert describe_adapters(model).endswith("frozen (train_added_tokens: false)")
    save_adapters(model, tmp_path, str(base))
    assert np.array_equal(read_adapters(tmp_path, model.config).new_rows[EMBEDDING], start)


def test_what_is_trained_is_counted(base):
    config, settings = grown(base), SETTINGS["LoRA"]
    matrices = 1 if config.tie_word_embeddings else 2
    more = adapter_parameter_count(config, settings) - adapter_parameter_count(ModelConfig.from_folder(base), settings)
    assert more == matrices * 10 * 16
    shapes = adapter_shapes(config, settings)
    assert set(shapes) == set(named_adapter_weights(adapted(base))) and shapes[EMBEDDING_ROWS] == (10, 16)
    assert EMBEDDING_ROWS not in adapter_shapes(grown(base, trained=False), settings)
    described = describe_adapters(adapted(base))
    assert described.endswith(f"; rows of 10 new tokens, {matrices * 160} parameters, trained")


def test_other_new_tokens_are_refused(base, tmp_path):
    save_adapters(adapted(base), tmp_path, str(base))
    for config, words in ((grown(base, count=12), "12 new tokens, ids 53 to 64"), (tiny_config(), "no new tokens")):
        with pytest.raises(ModelFileError, match="the vocabulary grew differently") as error:
            read_adapters(tmp_path, config)
        assert "10 new tokens, ids 53 to 62" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([53, 55], "consecutive"),
        ({"embed_tokens": [53, 54], "lm_head": [53]}, "embedding and head name other tokens"),
        ([53, "54"], "lists of token ids"),
        ("all", "lists of token ids"),
        ([54, 55], "does not follow on the 53 rows"),
        ([0, 1], "trains tokens of the base model"),
    ],
)
def test_other_ids_of_peft_are_refused(base, ids, words, tmp_path):
    save_adapters(adapted(base), tmp_path, str(base))
    path = tmp_path / ADAPTER_CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "trainable_token_indices": ids}))
    with pytest.raises(ModelFileError, match=words):
        adapter_vocabulary(tmp_path, ModelConfig.from_folder(base))


def test_an_embedding_without_new_tokens_is_refused(base, tmp_path):
    """PEFT writes the whole one where it is trained or was resized; leaving it out would be another model."""
    save_adapters(build_model(ModelConfig.from_folder(base), base, lora=SETTINGS["LoRA"]), tmp_path, str(base))
    path = tmp_path / "adapter_model.safetensors"
    file = SafetensorsFile(path)
    values = {name: file.read(name) for name in file.names()}
    values["base_model.model.model.embed_tokens.weight"] = np.zeros((53, 16), np.float32)
    save_file(values, path)
    with pytest.raises(ModelFileError, match=r"model\.embed_tokens\.weight: not an adapter of a linear layer"):
        read_adapters(tmp_path, ModelConfig.from_folder(base))


@pytest.mark.parametrize("first", [0, 3, 29, 32, 33, 63])
@pytest.mark.parametrize("count", [1, 30, 34])
def test_places_of_rows_in_shards(first, count):
    """Together the ranks have every row once, in the order of their ids."""
    if first + count > 64:
        count = 64 - first
    values, found = paddle.arange(count, dtype="float32").unsqueeze(1), []
    for rank in range(4):
        rows = place_rows(values, first, rank, 16)
        assert 0 <= rows.start <= rows.stop <= 16
        found += [(rank * 16 + rows.start + at, int(row)) for at, row in enumerate(rows.local().flatten())]
    assert found == [(first + number, number) for number in range(count)]
