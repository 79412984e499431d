"""The families' tables and the frequencies of rotary embeddings, without any model."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.rope_scaling import rotary_frequencies
from erniekit.model.weights import named_weights

from .published_families import CONFIGS, SIZES
from .tiny import CONFIG, config_file, logits_of, tiny_config, tiny_model

FAMILIES = tuple(sorted(ARCHITECTURES))
COMMON_FIELDS = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@st.composite
def config_files(draw, families=FAMILIES):
    """A `config.json` of one of these families, with any of its optional keys left out."""
    heads = draw(st.integers(1, 4))
    values = {
        "model_type": draw(st.sampled_from(families)),
        "vocab_size": draw(st.integers(1, 99)),
        "hidden_size": 8 * heads * draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 5)),
        "num_attention_heads": heads,
    }
    optional = {
        "num_key_value_heads": st.sampled_from([size for size in range(1, heads + 1) if heads % size == 0]),
        "head_dim": st.sampled_from([2, 6, 128]),
        "rope_theta": st.floats(1.5, 1e7),
        "rms_norm_eps": st.floats(1e-8, 1e-2),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "num_experts": st.integers(8, 20),
        "num_experts_per_tok": st.integers(1, 8),
        "decoder_sparse_step": st.integers(1, 3),
        "mlp_only_layers": st.lists(st.integers(0, 4)),
        "norm_topk_prob": st.booleans(),
        "sliding_window": st.none() | st.integers(1, 40),
        "moe_num_experts": st.integers(7, 20),
        "moe_k": st.integers(1, 7),
        "moe_layer_start_index": st.integers(0, 5),
        "moe_layer_end_index": st.integers(-1, 5),
        "moe_layer_interval": st.integers(1, 3),
        "num_nextn_predict_layers": st.integers(0, 2),
        "rope_scaling": st.sampled_from([None, LLAMA3, {"type": "linear", "factor": 2}]),
        "task_specific_params": st.dictionaries(st.text(), st.integers()),  # a key that nothing here reads
    }
    outer = ARCHITECTURES[values["model_type"]]
    architecture = outer.text or outer
    keys = {architecture.key_names.get(name, name) for name in (*COMMON_FIELDS, *architecture.own_fields)}
    keys |= {"task_specific_params", *architecture.own_keys}
    needed = architecture.defaults.keys() & {"num_key_value_heads"}  # which may not divide heads
    if values["model_type"] == "deepseek_v3":  # it has as many key heads as query heads
        optional["num_key_value_heads"], needed = st.just(heads), {"num_key_value_heads"}
    if values["model_type"] == "glm4":  # half of a head is turned, in pairs
        optional["head_dim"] = st.sampled_from([4, 128])
    for key, value in optional.items():
        if key not in keys:
            continue
        if key in needed or draw(st.booleans()):
            values[key] = draw(value)
    if values["model_type"] == "voxtral":
        values.setdefault("head_dim", 16)  # absent it is 128, whatever hidden_size is
    return config_file(values)


def asked_of(written, values):
    """The keys of `values` in what was written, those of dictionaries within it as well."""
    return {
        key: asked_of(written[key], value) if key.endswith("_config") else written[key] for key, value in values.items()
    }


@settings(max_examples=80, deadline=None, derandomize=True)
@given(config_files())
def test_what_is_read_is_written_and_read_again(values):
    config = ModelConfig.from_json(values)
    written = config.to_json()
    again = ModelConfig.from_json(written)
    assert again == config and again.to_json() == written
    assert asked_of(written, values) == values  # nothing that was asked for is lost or changed
    assert written["architectures"] == [config.architecture.transformers_class]
    assert again.weight_shapes() == config.weight_shapes()
    assert config.parameter_count() == sum(math.prod(shape) for shape in config.weight_shapes().values())
    hash(config)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(config_files(families=["ernie4_5_moe"]))
def test_layers_have_experts_where_the_interval_says(values):
    config = ModelConfig.from_json(values)
    last = config.moe_layer_end_index if config.moe_layer_end_index >= 0 else config.num_hidden_layers - 1
    for layer in range(config.num_hidden_layers):
        expected = config.moe_layer_start_index <= layer <= last and (layer + 1) % config.moe_layer_interval == 0
        assert (f"model.layers.{layer}.mlp.gate.weight" in config.weight_shapes()) == expected
        assert (f"model.layers.{layer}.mlp.down_proj.weight" in config.weight_shapes()) != expected


PUBLISHED = {
    "Qwen2.5-0.5B": (494_032_768, "qwen2", (151936, 896, 4864, 24, 14, 2), {}),
    "Qwen3-0.6B": (596_049_920, "qwen3", (151936, 1024, 3072, 28, 16, 8), {}),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        "qwen3_moe",
        (151936, 2048, 6144, 48, 32, 4),
        {"head_dim": 128, "tie_word_embeddings": False},
    ),
    "Mistral-7B": (
        7_241_732_096,
        "mistral",
        (32000, 4096, 14336, 32, 32, 8),
        {"tie_word_embeddings": False},
    ),
    "Llama-3.2-1B": (1_235_814_400, "llama", (128256, 2048, 8192, 16, 32, 8), {}),
    "ERNIE-4.5-21B-A3B, without its prediction layer": (
        21_825_437_888,
        "ernie4_5_moe",
        (103424, 2560, 12288, 28, 20, 4),
        {"moe_num_experts": 64},
    ),
}


@pytest.mark.parametrize(("count", "family", "sizes", "more"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_models_have_their_published_sizes(count, family, sizes, more):
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = dict(zip((*keys, "num_key_value_heads"), sizes, strict=True))
    config = ModelConfig.from_json({"model_type": family, "tie_word_embeddings": True, **values, **more})
    assert config.parameter_count() == count


@pytest.mark.parametrize("name", SIZES)
def test_published_files_give_the_published_sizes(name):
    assert ModelConfig.from_json(CONFIGS[name]).parameter_count() == SIZES[name]


@pytest.mark.parametrize(
    ("family", "changes", "biased"),
    [
        ("ernie4_5", {}, set()),
        ("ernie4_5", {"use_bias": True}, {"q", "k", "v", "o", "gate", "up", "down"}),
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("llama", {"mlp_bias": True}, {"gate", "up", "down"}),
        ("mistral", {}, set()),
        ("qwen2", {}, {"q", "k", "v"}),
        ("qwen3", {}, set()),
        ("qwen3", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("qwen3_moe", {"attention_bias": True, "mlp_only_layers": [1]}, {"q", "k", "v", "o"}),
        ("qwen2_moe", {}, {"q", "k", "v"}),
        ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [1]}, set()),
        ("mixtral", {}, set()),
        ("granite", {"attention_bias": True, "mlp_bias": True}, {"q", "k", "v", "o", "gate", "up", "down"}),
        ("smollm3", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("olmo2", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("glm4", {}, {"q", "k", "v"}),
        ("glm4", {"attention_bias": False}, set()),
        ("gemma3_text", {"attention_bias": True}, {"q", "k", "v", "o"}),
        ("gpt_oss", {}, {"q", "k", "v", "o", "router", "gate", "up", "down"}),
        ("deepseek_v3", {"attention_bias": True}, {"q_a", "kv_a_proj_with_mqa", "o"}),
        ("deepseek_v3", {"q_lora_rank": None}, set()),
    ],
)
def test_the_decoder_has_the_weights_that_are_listed(family, changes, biased):
    decoder = tiny_model(model_type=family, head_dim=4, **changes)
    listed = decoder.config.weight_shapes()
    assert sorted(named_weights(decoder)) == sorted(listed)
    assert {name.split(".")[-2].removesuffix("_proj") for name in listed if name.endswith(".bias")} == biased
    assert any("q_norm" in name for name in listed) == (
        family.startswith("qwen3") or family in ("olmo2", "gemma3_text")
    )


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_documents_of_a_row_have_the_logits_that_each_has_alone(family):
    decoder = tiny_model(model_type=family, head_dim=8)
    ids = np.random.default_rng(3).integers(0, 53, 40)
    packed = logits_of(decoder, ids, ends=[11, 12, 40])
    alone = np.concatenate([logits_of(decoder, ids[start:stop]) for start, stop in ((0, 11), (11, 12), (12, 40))])
    assert np.std(alone) > 0.1
    np.testing.assert_allclose(packed, alone, atol=2e-5)


@pytest.mark.parametrize(("window", "expected"), [(None, None), (4096, None), (128, None), (127, 127)])
def test_a_window_acts_where_documents_can_be_longer(window, expected):
    config = tiny_config(model_type="mistral", sliding_window=window, max_position_embeddings=128)
    assert config.architecture.layer_attention(config, 1).window == expected
    assert config.to_json()["sliding_window"] == window


def test_experts_stand_where_neither_the_step_nor_the_list_leaves_them_out():
    config = tiny_config(model_type="qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1, 2])
    assert [config.is_moe_layer(layer) for layer in range(6)] == [False, False, False, True, False, True]


def test_layers_have_windows_and_tables_by_their_type():
    published = tiny_config(model_type="gemma3_text", num_hidden_layers=7, sliding_window=9)
    named = tiny_config(model_type="gpt_oss", layer_types=["full_attention", "sliding_attention"])
    attention = [published.architecture.layer_attention(published, layer) for layer in range(7)]
    assert attention == [(9, 1)] * 5 + [(None, 0)] + [(9, 1)]
    assert [named.architecture.layer_attention(named, layer).window for layer in range(2)] == [None, 9]


def test_layers_turn_nothing_where_the_list_or_the_interval_says():
    layers = [{"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 0]}]
    configs = [tiny_config(model_type="smollm3", num_hidden_layers=4, **change) for change in layers]
    turned = [[config.architecture.layer_attention(config, layer).rope for layer in range(4)] for config in configs]
    assert turned == [[0, None, 0, None], [None, 0, 0, None]]


def test_the_part_of_a_head_that_is_not_turned_has_no_frequency():
    config = tiny_config(model_type="glm4", head_dim=16, partial_rotary_factor=0.25)
    (table,) = config.architecture.rope_tables(config)
    assert table.per_pair == (1.0, 0.01, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected a 0 or 1 for each of 2 layers, got [1]"),
        ("glm4", {"head_dim": 10, "partial_rotary_factor": 0.5}, "0.5 of head_dim 10 is no part of pairs"),
        (
            "gemma3_text",
            {"layer_types": ["full_attention"]},
            "layer_types: expected sliding_attention or full_attention",
        ),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "weights as 'mxfp4' cannot be read"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "as many key heads as num_attention_heads"),
        ("deepseek_v3", {"n_group": 3}, "n_group: n_routed_experts 8 is no multiple of it with 2 experts or more"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group: more than n_group, or its groups have fewer"),
        ("deepseek_v3", {"v_head_dim": 12}, "v_head_dim at most qk_nope_head_dim + qk_rope_head_dim"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: must be at least 1e-06, got 0"),
        ("mistral", {"sliding_window": 0}, "sliding_window: must be positive, got 0"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window: True is not supported; only False is"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: "),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; only 'silu' is"),
        ("llama", {"alibi": True}, "alibi: True is not supported"),
        ("llama", {"rope_scaling_type": "ntk"}, "rope_scaling_type: 'ntk' is not supported"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: "),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act: 'sigmoid' is not supported; only 'softmax'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias: True is not supported"),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 5}, "moe_k 5 is more than moe_num_experts 4"),
        (
            "qwen3_moe",
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 is more than num_experts 4",
        ),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers: expected numbers of layers, got ['0']"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected list, got 1"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": 0}}, "factor must be a positive number for llama3, got 0"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor must be more than"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "32"}}, "beta_fast must be"),
    ],
)
def test_what_would_compute_something_else_is_refused(family, change, message):
    with pytest.raises(ModelFileError) as error:
        tiny_config(model_type=family, **change)
    assert message in str(error.value)


@pytest.mark.parametrize("change", [{"layer_types": ["full_attention"] * 2}, {"sliding_window": 4096}])
def test_neutral_values_are_accepted(change):
    assert tiny_config(model_type="qwen2", use_sliding_window=False, **change).model_type == "qwen2"


def frequencies(**changes):
    return rotary_frequencies(ModelConfig.from_json({**CONFIG, "model_type": "llama", "head_dim": 64, **changes}))


def test_llama3_keeps_fast_pairs_and_stretches_slow_ones():
    plain, scaled = (np.array(frequencies(rope_scaling=scaling).per_pair) for scaling in (None, LLAMA3))
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-12)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()
    assert (np.diff(scaled) < 0).all()


def test_linear_scaling_divides_and_yarn_grows_the_scores():
    plain = np.array(frequencies().per_pair)
    np.testing.assert_allclose(frequencies(rope_scaling={"type": "linear", "factor": 4}).per_pair, plain / 4)
    yarn = frequencies(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        max_position_embeddings=16384,
    )
    assert yarn.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    np.testing.assert_allclose(yarn.per_pair[0], plain[0])
    np.testing.assert_allclose(yarn.per_pair[-1], plain[-1] / 4)
    assert frequencies(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7}).magnitude == 0.7
