"""What every architecture must say of its weights, and what an odd one may change without a shared file."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from paddle import nn

from erniekit.distributed.stages import layer_chunks, shapes_on_pp_stage
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.static_program import save_program
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.architectures.architecture import Key, Tower
from erniekit.model.architectures.llama import LLAMA
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import LayerAttention
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.rope_scaling import rotary_frequencies
from erniekit.model.architectures.sharding import NORM, REPLICATED_LINEAR, ModuleRule, Placement, prefixed
from erniekit.model.architectures.stacked_experts import place_of
from erniekit.model.builder import build_model
from erniekit.model.decoder import PLAIN_MODULES, Embedding
from erniekit.model.linear import Linear
from erniekit.model.lora.config import LoraSettings, adapter_targets
from erniekit.model.lora.lora import named_adapters
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.weights import named_linears, named_weights, save_weights

from .test_families import config_files
from .tiny import logits_of, tiny_config, tiny_model


def _rules(architecture):
    towers = {path: rule for tower in architecture.towers for path, rule in prefixed(tower.prefix, tower.rules).items()}
    return {**prefixed(architecture.decoder_prefix, {**architecture.rules, **architecture.mtp_rules}), **towers}


def _matches(pattern, path):
    return re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(pattern)), path) is not None


@settings(max_examples=80, deadline=None, derandomize=True)
@given(config_files())
def test_every_weight_has_exactly_one_rule(values):
    config = ModelConfig.from_json(values)
    rules = _rules(config.architecture)
    for name in config.weight_shapes():
        matching = [pattern for pattern in rules if _matches(pattern, name.rpartition(".")[0])]
        assert len(matching) == 1, (name, matching)
        assert config.architecture.weight_info(name).rule is rules[matching[0]]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.q_proj.scale",
        "model.layers.0.self_attn.q_proj",
        "audio_tower.layers.0.self_attn.o_proj.weight",
        "model.embed_tokens.lora_A",
        "model.layers.x.self_attn.q_proj.weight",
        "",
    ],
)
def test_a_weight_that_no_rule_names_is_an_error(model_type, name):
    with pytest.raises(LookupError, match=f"no rule of the architecture {model_type} names this weight"):
        ARCHITECTURES[model_type].placement(name)


def test_two_rules_for_one_module_are_an_error():
    twice = replace(LLAMA, rules={"model.layers.{layer}.mlp": NORM, "model.layers.{number}.mlp": NORM})
    with pytest.raises(AssertionError, match="two rules for"):
        twice.placement("model.norm.weight")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_adapters_stand_beside_all_linears_of_the_present_families(model_type):
    config = tiny_config(model_type=model_type, head_dim=4)
    linears = named_linears(build_model(config, None))
    assert list(config.linear_shapes()) == list(linears)
    stacked, in_decoder = config.architecture.stacked_experts, config.architecture.decoder_prefix
    expected = [path for path in linears if place_of(f"{path}.weight", stacked) is None and path.startswith(in_decoder)]
    assert adapter_targets(config, ()) == expected
    for path, linear in linears.items():
        assert config.linear_shapes()[path] == tuple(linear.weight.shape[::-1])


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_rank_has_the_slices_that_the_rules_say(model_type):
    """The rules and the layers say the same of every weight, and the ranks' slices make up one process's weights."""
    config = tiny_config(model_type=model_type, vocab_size=56, head_dim=4)
    whole = named_weights(build_model(config, None, seed=5))
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        sliced = named_weights(build_model(config, None, seed=5, tp=tp))
        assert list(sliced) == list(config.weight_shapes())
        for name, weight in whole.items():
            expected = tp.local_shard(weight.numpy(), config.architecture.placement(name).axis)
            np.testing.assert_array_equal(sliced[name].numpy(), expected, err_msg=name)


def test_a_file_with_a_weight_of_another_architecture_is_refused(tmp_path):
    decoder = tiny_model(model_type="qwen3", head_dim=4)
    save_weights(decoder, tmp_path)
    with pytest.raises(ModelFileError) as refused:
        build_model(tiny_config(model_type="llama", head_dim=4), tmp_path)
    assert "(llama, Hugging Face layout)" in str(refused.value)
    assert "model.layers.0.self_attn.q_norm.weight: the model has no such weight" in str(refused.value)


def test_further_layers_of_a_file_are_left_out_where_the_configuration_counts_them(tmp_path):
    save_weights(tiny_model(model_type="deepseek_v3", num_hidden_layers=3), tmp_path)
    config = tiny_config(model_type="deepseek_v3", num_nextn_predict_layers=1)
    assert "model.layers.1.mlp.gate.weight" in named_weights(build_model(config, tmp_path))
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\..*: the model has no such weight"):
        build_model(tiny_config(model_type="deepseek_v3"), tmp_path)


# An encoder in front of the decoder, with the names of Whisper's.

CHANNELS = 6
_TOWER_LAYER = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), REPLICATED_LINEAR),
    **dict.fromkeys(("self_attn.out_proj", "fc1", "fc2"), REPLICATED_LINEAR),
    "self_attn_layer_norm": ModuleRule("norm", ("weight", "bias"), initial=1.0),
}
TOWER_RULES = {
    "conv1": ModuleRule("other", ("weight", "bias")),
    "embed_positions": ModuleRule("embedding"),
    **prefixed("layers.{number}.", _TOWER_LAYER),
    "layer_norm": ModuleRule("norm", ("weight", "bias"), initial=1.0),
}


def tower_shapes(config):
    size = config.own["audio_size"]
    shapes = {"conv1.weight": (size, CHANNELS, 3), "conv1.bias": (size,), "embed_positions.weight": (10, size)}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes[f"layers.0.self_attn.{name}.weight"] = (size, size)
        shapes |= {} if name == "k_proj" else {f"layers.0.self_attn.{name}.bias": (size,)}
    shapes |= {"layers.0.self_attn_layer_norm.weight": (size,), "layers.0.self_attn_layer_norm.bias": (size,)}
    shapes |= {"layers.0.fc1.weight": (2 * size, size), "layers.0.fc1.bias": (2 * size,)}
    shapes |= {"layers.0.fc2.weight": (size, 2 * size), "layers.0.fc2.bias": (size,)}
    return shapes | {"layer_norm.weight": (size,), "layer_norm.bias": (size,)}


class _Part(nn.Layer):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def build_tower(config, tp):
    size = config.own["audio_size"]
    attention = _Part(
        q_proj=Linear(size, size, True), k_proj=Linear(size, size), v_proj=Linear(size, size, True),
        out_proj=Linear(size, size, True),
    )  # fmt: skip
    layer = _Part(
        self_attn=attention, self_attn_layer_norm=nn.LayerNorm(size), fc1=Linear(size, 2 * size, True),
        fc2=Linear(2 * size, size, True),
    )  # fmt: skip
    return _Part(
        conv1=nn.Conv1D(CHANNELS, size, 3), embed_positions=nn.Embedding(10, size), layers=nn.LayerList([layer]),
        layer_norm=nn.LayerNorm(size),
    )  # fmt: skip


def embed_audio(decoder, inputs):
    """A clip's states stand at the first positions of the row, in the channels that they have."""
    hidden = decoder.embedding(inputs["input_ids"])
    if "audio" not in inputs:
        return hidden
    states = decoder.towers[0].conv1(inputs["audio"]).transpose([0, 2, 1])
    missing = [hidden.shape[2] - states.shape[2], hidden.shape[1] - states.shape[1]]  # the last axis first
    return hidden + nn.functional.pad(states, [0, missing[0], 0, missing[1]], data_format="NCL")


AUDIO = replace(
    LLAMA,
    model_type="tiny_audio",
    input_names=("input_ids", "audio"),
    embed=embed_audio,
    own_keys={"audio_size": Key(int, 1, default=4)},
    towers=(Tower("audio_tower.", tower_shapes, TOWER_RULES, build_tower),),
)


@pytest.fixture
def audio(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "tiny_audio", AUDIO)
    return tiny_config(model_type="tiny_audio", vocab_size=56, audio_size=8)


def test_no_weight_of_a_tower_is_cut_that_its_rules_do_not_cut(audio):
    own = [name for name in audio.weight_shapes() if name.startswith("audio_tower.")]
    assert "audio_tower.layers.0.self_attn.out_proj.weight" in own
    for name in own:
        assert audio.architecture.placement(name) == Placement(), name
    sliced = named_weights(build_model(audio, None, seed=2, tp=TensorParallel(rank=1, size=2)))
    whole = named_weights(build_model(audio, None, seed=2))
    assert list(whole) == list(sliced) == list(audio.weight_shapes())
    for name in own:
        np.testing.assert_array_equal(sliced[name].numpy(), whole[name].numpy(), err_msg=name)


def test_an_architecture_embeds_what_its_tower_makes_of_other_arrays(audio):
    decoder = build_model(audio, None, seed=4)
    assert decoder.input_names == ("input_ids", "audio")
    ids = paddle.to_tensor(IDS[None])
    clip = paddle.to_tensor(np.random.default_rng(0).standard_normal((1, CHANNELS, 7)).astype(np.float32))
    text, both = decoder.embed({"input_ids": ids}), decoder.embed({"input_ids": ids, "audio": clip})
    changed = np.abs((both - text).numpy()[0]) > 0
    assert changed[:5, :8].all() and not changed[5:].any() and not changed[:, 8:].any()
    both.sum().backward()
    assert decoder.towers[0].conv1.weight.grad is not None


def test_adapters_never_reach_a_tower_by_accident(audio):
    def targets(*patterns):
        return adapter_targets(audio, patterns)

    assert len(targets()) == 2 * 7 and not any(path.startswith("audio_tower.") for path in targets())
    for patterns in (("q_proj",), ("self_attn.q_proj",), ("*.q_proj",), (r"re:.*q_proj",)):
        assert targets(*patterns) == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)], patterns
    in_tower = "audio_tower.layers.0.self_attn.q_proj"
    assert targets("audio_tower.*.q_proj") == targets(r"re:audio_tower\..*\.q_proj") == [in_tower]
    assert (
        targets("audio_tower.*.q_proj", "v_proj")[0] == in_tower and len(targets("audio_tower.*.q_proj", "v_proj")) == 3
    )
    with pytest.raises(ConfigurationError, match="'fc1' names no linear layer"):
        targets("fc1")
    adapted = named_adapters(build_model(audio, None, lora=LoraSettings(2, 4.0)))
    assert list(adapted) == targets()


def test_a_tower_is_saved_and_loaded_and_lies_on_the_first_stage(audio, tmp_path):
    decoder = build_model(audio, None, seed=3)
    assert (named_weights(decoder)["audio_tower.layer_norm.weight"].numpy() == 1).all()
    save_weights(decoder, tmp_path)
    loaded = named_weights(build_model(audio, tmp_path))
    for name, weight in named_weights(decoder).items():
        np.testing.assert_array_equal(loaded[name].numpy(), weight.numpy(), err_msg=name)
    topology = Topology(pipeline=2)
    chunks = layer_chunks(2, topology)
    first, last = (shapes_on_pp_stage(audio.weight_shapes(), audio, topology, chunks, stage) for stage in (0, 1))
    assert any(name.startswith("audio_tower.") for name in first)
    assert not any(name.startswith("audio_tower.") for name in last)


def test_a_tower_weight_without_a_rule_is_an_error_before_anything_is_made(audio, monkeypatch):
    rules = {path: rule for path, rule in TOWER_RULES.items() if path != "conv1"}
    tower = AUDIO.towers[0]._replace(rules=rules)
    monkeypatch.setitem(ARCHITECTURES, "tiny_audio", replace(AUDIO, towers=(tower,)))
    with pytest.raises(LookupError, match=r"audio_tower\.conv1\.weight: no rule of the architecture tiny_audio"):
        build_model(audio, None)


def test_own_keys_are_checked_and_written(audio):
    assert audio.own == {"audio_size": 8} and audio.to_json()["audio_size"] == 8
    assert tiny_config(model_type="tiny_audio").own == {"audio_size": 4}
    with pytest.raises(ModelFileError, match="audio_size: must be positive, got 0"):
        tiny_config(model_type="tiny_audio", audio_size=0)


# Layers that differ from one another.


def _with_layers(monkeypatch, *attention):
    """A family whose layers attend so in turn, with two rope tables."""

    def tables(config):
        return rotary_frequencies(config), rotary_frequencies(replace(config, rope_theta=50.0))

    odd = replace(
        LLAMA,
        model_type="odd",
        rope_tables=tables,
        layer_attention=lambda config, layer: attention[layer % len(attention)],
    )
    monkeypatch.setitem(ARCHITECTURES, "odd", odd)
    return tiny_model(model_type="odd", head_dim=8)


IDS = np.random.default_rng(8).integers(0, 53, 23)


def test_layers_with_windows_see_no_further(monkeypatch):
    """Two layers with a window of 3 reach back 2 x 2 positions, and no further."""
    decoder = _with_layers(monkeypatch, LayerAttention(window=3))
    plain = logits_of(decoder, IDS)
    for position, changes in ((10, range(10, 15)), (0, range(5))):
        other = IDS.copy()
        other[position] = (other[position] + 1) % 53
        changed = np.abs(logits_of(decoder, other) - plain).max(1) > 0
        assert np.flatnonzero(changed).tolist() == list(changes)


def test_a_window_as_long_as_the_document_changes_nothing(monkeypatch):
    wide = logits_of(_with_layers(monkeypatch, LayerAttention(window=12)), IDS, ends=[12, 23])
    full = logits_of(_with_layers(monkeypatch, LayerAttention()), IDS, ends=[12, 23])
    np.testing.assert_array_equal(wide, full)


def test_layers_choose_their_rope_table(monkeypatch):
    both = logits_of(_with_layers(monkeypatch, LayerAttention(rope=0), LayerAttention(rope=1)), IDS)
    first = logits_of(_with_layers(monkeypatch, LayerAttention(rope=0)), IDS)
    second = logits_of(_with_layers(monkeypatch, LayerAttention(rope=1)), IDS)
    assert min(np.abs(both - first).max(), np.abs(both - second).max()) > 1e-3
    other_theta = tiny_model(model_type="llama", head_dim=8, rope_theta=50.0)
    np.testing.assert_array_equal(second, logits_of(other_theta, IDS))


def test_answers_with_windows_are_those_of_the_whole_forward_pass(monkeypatch):
    decoder = _with_layers(monkeypatch, LayerAttention(window=4), LayerAttention(rope=1))
    prompts = [IDS[:9].tolist(), IDS[9:11].tolist()]
    answers = generate(decoder, prompts, Sampling(max_new_tokens=12))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for token in answer:
            assert logits_of(decoder, tokens)[-1].argmax() == token
            tokens.append(token)


def test_a_saved_program_with_windows_is_refused_by_name(monkeypatch, tmp_path):
    decoder = _with_layers(monkeypatch, LayerAttention(window=4), LayerAttention())
    with pytest.raises(ModelFileError, match="odd: layers attend to the last 4 positions only"):
        save_program(decoder, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_saved_program_with_an_encoder_is_refused_by_name(tmp_path):
    with pytest.raises(ModelFileError, match="voxtral: an encoder stands in front of the decoder, which a saved"):
        save_program(tiny_model(model_type="voxtral", head_dim=4), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_saved_program_with_sinks_is_refused_by_name(tmp_path):
    with pytest.raises(ModelFileError, match="gpt_oss: attention has sinks, which a saved program cannot compute yet"):
        save_program(tiny_model(model_type="gpt_oss", head_dim=4), tmp_path)
    assert not any(tmp_path.iterdir())


class _ScaledEmbedding(Embedding):
    def forward(self, input_ids_BS):
        return 3.0 * super().forward(input_ids_BS)


def test_an_architecture_may_bring_its_own_classes(monkeypatch):
    odd = replace(LLAMA, model_type="odd", modules=lambda: PLAIN_MODULES._replace(embedding=_ScaledEmbedding))
    monkeypatch.setitem(ARCHITECTURES, "odd", odd)
    plain, scaled = (tiny_model(model_type=family, tie_word_embeddings=False) for family in ("llama", "odd"))
    with paddle.no_grad():
        plain.embedding.weight.set_value(3.0 * plain.embedding.weight)
    np.testing.assert_allclose(logits_of(scaled, IDS), logits_of(plain, IDS), atol=1e-5)
