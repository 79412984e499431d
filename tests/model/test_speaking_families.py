"""Families that write codes: their keys, the names and places of their weights, and which decoders they take."""

from __future__ import annotations

import json

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.distributed.stages import layer_chunks, shapes_on_pp_stage
from erniekit.distributed.topology import Topology
from erniekit.errors import ModelFileError
from erniekit.inference.engine import ChatModel
from erniekit.model.architectures.config_reading import written_config
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.parts import AUDIO, LLM, part_of
from erniekit.model.architectures.registry import ARCHITECTURES, around
from erniekit.model.architectures.speaking import (
    KINDS,
    code_layout,
    codebook_weights,
    control_tokens,
    decoder_names,
)
from erniekit.model.builder import build_model
from erniekit.model.local_tensors import SingleProcessTensors
from erniekit.model.lora.config import LoraSettings, adapter_targets
from erniekit.model.lora.lora import local_adapters, save_adapters
from erniekit.model.mlp import geglu
from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.vocabulary import grow, grown_vocabulary, vocabulary_weights
from erniekit.model.weights import named_weights, save_model_folder

from .tiny import CONFIG, FAMILIES
from .tiny_speech import omnivoice_config, omnivoice_values, speaking_model, vall_e_config, vall_e_values

CONFIGS = {"omnivoice": omnivoice_config(), "vall_e": vall_e_config(classifiers_bias=True)}
PLAIN = tuple(name for name, each in ARCHITECTURES.items() if each.text is None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", PLAIN)
def test_every_plain_family_can_write_codes_or_says_why_not(kind, family):
    """Windows, sinks and multi-token prediction have no meaning between tables and heads of codes."""
    values = {**CONFIG, **FAMILIES.get(family, {}), "model_type": family, "vocab_size": 56, "head_dim": 4}
    values |= FAMILIES.get(family, {})
    outer = omnivoice_values() if kind == "omnivoice" else vall_e_values()
    try:
        config = ModelConfig.from_json({**outer, "llm_config": values})
    except ModelFileError as error:
        assert "is not defined here" in str(error), error
        assert family in {"gpt_oss", "gemma3_text", "mistral", "mixtral", "smollm3"}
        return
    decoder = build_model(config, None, seed=1)
    assert {name: list(weight.shape) for name, weight in named_weights(decoder).items()}.keys() == dict(
        config.weight_shapes()
    ).keys()
    assert list(named_weights(decoder)) == list(config.weight_shapes())
    assert config.model_type == f"{kind}:{family}" and config.architecture.model_type == kind
    for name in config.weight_shapes():
        config.architecture.weight_info(name)


def test_weights_have_the_names_of_the_package():
    names = list(CONFIGS["omnivoice"].weight_shapes())
    assert names[:3] == ["audio_embeddings.weight", "llm.embed_tokens.weight", "llm.layers.0.input_layernorm.weight"]
    assert names[-2:] == ["llm.norm.weight", "audio_heads.weight"]
    assert CONFIGS["omnivoice"].weight_shapes()["audio_heads.weight"] == (4 * 17, 16)


def test_weights_of_vall_e_have_a_table_and_a_head_for_each_level():
    shapes = CONFIGS["vall_e"].weight_shapes()
    assert [name for name in shapes if "_emb." in name] == [
        *(f"proms_emb.embeddings.{level}.weight" for level in range(4)),
        *(f"resps_emb.embeddings.{level}.weight" for level in range(4)),
    ]
    assert shapes["resps_emb.embeddings.0.weight"] == (17, 16) and shapes["resps_emb.embeddings.1.weight"] == (16, 16)
    heads = {name: shape for name, shape in shapes.items() if name.startswith("classifiers.")}
    assert heads["classifiers.proj.0.weight"] == (17, 16) and heads["classifiers.proj.0.bias"] == (17,)
    assert heads["classifiers.proj.3.weight"] == (16, 16) and heads["classifiers.proj.4.weight"] == (56, 16)
    assert "classifiers.proj.4.bias" not in heads  # its rows grow with the vocabulary
    assert "model.embed_tokens.weight" in shapes and "lm_head.weight" not in shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_is_read_to_the_bit(kind, tmp_path):
    decoder = speaking_model(CONFIGS[kind])
    save_model_folder(decoder, tmp_path)
    found = ModelConfig.from_folder(tmp_path)
    assert found == CONFIGS[kind]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    again = build_model(found, tmp_path)
    for name, weight in named_weights(decoder).items():
        np.testing.assert_array_equal(named_weights(again)[name].numpy(), weight.numpy(), err_msg=name)


def test_files_of_omnivoice_have_the_offsets_of_the_levels(tmp_path):
    save_model_folder(speaking_model(CONFIGS["omnivoice"]), tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert file.stored("codebook_layer_offsets").dtype == "I64"
    assert file.read("codebook_layer_offsets").tolist() == [0, 17, 34, 51]
    save_model_folder(speaking_model(CONFIGS["vall_e"]), tmp_path / "vall_e")
    assert "codebook_layer_offsets" not in SafetensorsFile(tmp_path / "vall_e" / "model.safetensors").names()


def test_keys_of_the_decoder_and_of_codes_are_written_back():
    values = written_config(CONFIGS["omnivoice"])
    assert values["audio_codebook_weights"] == [8, 6, 4, 2] and values["num_audio_codebook"] == 4
    assert values["llm_config"]["model_type"] == "qwen3" and values["llm_config"]["tie_word_embeddings"] is True
    values = written_config(CONFIGS["vall_e"])
    assert values["llm_config"]["hidden_act"] == "gelu" and values["classifiers_bias"] is True


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (omnivoice_values(audio_mask_id=3), "audio_mask_id: 3 is not supported; only audio_vocab_size - 1, 16, is"),
        (omnivoice_values(audio_codebook_weights=[1, 2]), "audio_codebook_weights: 2 weights of 4 levels"),
        (omnivoice_values(audio_codebook_weights=[0, 0, 0, 0]), "which are not all 0"),
        (omnivoice_values(audio_codebook_weights=[1, 2, 3, "4"]), "expected numbers of 0 or more"),
        (omnivoice_values(num_audio_codebook=0), "num_audio_codebook: must be positive"),
        (omnivoice_values(llm={"head_dim": 3}), "llm_config.head_dim 3 is odd"),
        (omnivoice_values(llm={"model_type": "voxtral"}), "llm_config.model_type 'voxtral' is not supported"),
        ({"model_type": "omnivoice"}, "llm_config: expected the keys of a decoder, got None"),
        ({"model_type": "vall_e", "llm_config": 3}, "llm_config: expected the keys of a decoder, got 3"),
        (vall_e_values(noncausal_masks="yes"), "noncausal_masks: expected bool"),
        (vall_e_values(odd_key=1), "odd_key: 1 is not understood"),
        (vall_e_values(llm={"hidden_act": "relu"}), "llm_config.hidden_act: 'relu' is not supported"),
    ],
)
def test_what_cannot_be_used_is_said_by_its_key(values, words):
    with pytest.raises(ModelFileError) as refused:
        ModelConfig.from_json(values)
    assert words in str(refused.value)


def test_weights_of_levels_are_those_of_the_file_or_what_was_published():
    assert codebook_weights(CONFIGS["omnivoice"]) == (8, 6, 4, 2)
    assert codebook_weights(omnivoice_config(audio_codebook_weights=None)) == (1, 1, 1, 1)
    eight = omnivoice_config(audio_codebook_weights=None, num_audio_codebook=8)
    assert codebook_weights(eight) == (8, 8, 6, 6, 4, 4, 2, 2)


def test_a_decoder_with_gelu_computes_it_exactly():
    assert vall_e_config().architecture.activation == "geglu"
    assert vall_e_config(llm={"hidden_act": "silu"}).architecture.activation == "swiglu"
    gate, up = paddle.randn([3, 5]), paddle.randn([3, 5])
    np.testing.assert_allclose(geglu(gate, up).numpy(), (F.gelu(gate, approximate=False) * up).numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_all_rows_of_codes_and_its_slices_of_the_decoder(kind):
    config = CONFIGS[kind]
    whole = named_weights(build_model(config, None, seed=5))
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        sliced = named_weights(build_model(config, None, seed=5, tp=tp))
        for name, weight in whole.items():
            expected = tp.local_shard(weight.numpy(), config.architecture.placement(name).axis)
            np.testing.assert_array_equal(sliced[name].numpy(), expected, err_msg=name)
    tables = [name for name, _ in code_layout(config).tables]
    heads = {name for name, _ in code_layout(config).heads}
    for name in (*tables, *heads):
        assert config.architecture.placement(name).axis is None
        assert config.architecture.placement(name, sequence_parallel=True).partial == (name in heads)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_lie_on_the_first_pipeline_stage_and_heads_on_the_last(kind):
    config = CONFIGS[kind]
    topology = Topology(pipeline=2)
    chunks = layer_chunks(config.num_hidden_layers, topology)
    first, last = (shapes_on_pp_stage(config.weight_shapes(), config, topology, chunks, stage) for stage in range(2))
    layout = code_layout(config)
    assert {name for name, _ in layout.tables} <= first.keys() and {name for name, _ in layout.heads} <= last.keys()
    embedding = config.architecture.file_name("model.embed_tokens.weight")
    assert embedding in first and embedding not in last  # whatever tie_word_embeddings says
    assert first.keys() | last.keys() == config.weight_shapes().keys() and not first.keys() & last.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_adapters(kind):
    config = CONFIGS[kind]
    parts = {name: part_of(config.architecture, name) for name in config.weight_shapes()}
    assert {name for name, part in parts.items() if part == AUDIO} == {name for name, _ in code_layout(config).tables}
    assert LLM in parts.values()
    targets = adapter_targets(config, ())
    prefix = "llm.layers" if kind == "omnivoice" else "model.layers"
    assert len(targets) == 14 and all(path.startswith(prefix) for path in targets)
    lora = LoraSettings(2, 4.0)
    decoder = build_model(config, None, lora=lora)
    trained = [name for name, each in decoder.named_parameters() if not each.stop_gradient]
    assert trained and all("lora" in name or "adapter" in name for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_get_rows_and_codes_do_not(kind, tmp_path):
    config = CONFIGS[kind]
    decoder = speaking_model(config)
    save_model_folder(decoder, tmp_path)
    larger = grow(config, grown_vocabulary(config, 56, 3, seed=2))
    assert vocabulary_weights(larger) == (
        ("llm.embed_tokens.weight",)
        if kind == "omnivoice"
        else ("model.embed_tokens.weight", "classifiers.proj.4.weight")
    )
    grown = named_weights(build_model(larger, tmp_path))
    for name, weight in named_weights(decoder).items():
        found = grown[name].numpy()
        assert found.shape[0] == (64 if name in vocabulary_weights(larger) else weight.shape[0])
        np.testing.assert_array_equal(found[: weight.shape[0]], weight.numpy(), err_msg=name)


def test_names_of_the_decoder_in_both_kinds_of_files():
    names = decoder_names(CONFIGS["omnivoice"])
    assert names["llm.layers.1.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    assert names["llm.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert decoder_names(CONFIGS["vall_e"])["model.norm.weight"] == "model.norm.weight"


def test_control_tokens():
    assert control_tokens("omnivoice", 8)[0] == "<|denoise|>" and len(control_tokens("omnivoice", 8)) == 7
    assert control_tokens("vall_e", 2)[-2:] == ("<|level:0|>", "<|level:1|>")
    assert len(set(control_tokens("vall_e", 8))) == 7 + 8


def test_a_family_is_made_once():
    assert around("omnivoice", ARCHITECTURES["qwen3"]) is CONFIGS["omnivoice"].architecture


@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_answer_with_text_refuse_it(kind, tiny_model, tmp_path):
    save_model_folder(speaking_model(CONFIGS[kind]), tmp_path, load_tokenizer(tiny_model).files)
    with pytest.raises(ModelFileError, match="writes codes of speech and no text\n  Let it speak: erniekit speak"):
        ChatModel.load(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_saved_as_those_of_a_model_that_generates_no_text(kind, tmp_path):
    """PEFT then asks nothing of the model that the package's class does not have."""
    decoder = build_model(CONFIGS[kind], None, lora=LoraSettings(2, 4.0))
    save_adapters(decoder, tmp_path, "base", SingleProcessTensors(local_adapters(decoder)))
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    assert values["task_type"] is None and values["peft_type"] == "LORA"
    names = SafetensorsFile(tmp_path / "adapter_model.safetensors").names()
    prefix = "base_model.model.llm." if kind == "omnivoice" else "base_model.model.model."
    assert names and all(name.startswith(f"{prefix}layers.") for name in names)
    again = build_model(CONFIGS[kind], None, adapters=tmp_path)
    assert len(local_adapters(again).tensors) == len(local_adapters(decoder).tensors)
