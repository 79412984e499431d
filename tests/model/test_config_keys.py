"""Which keys of `config.json` are read, which change nothing, and which are refused."""

from __future__ import annotations

import json
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ModelFileError
from erniekit.model.architectures.architecture import Architecture, Key
from erniekit.model.architectures.config_keys import DROPOUT_KEYS, INERT_KEYS
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.rope_parameters import RopeKeys

from .published_configs import PUBLISHED_CONFIGS
from .published_families import CONFIGS
from .tiny import CONFIG, tiny_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("values", [*PUBLISHED_CONFIGS.values(), *CONFIGS.values()], ids=[*PUBLISHED_CONFIGS, *CONFIGS])
def test_published_files_are_read(values):
    config, values = ModelConfig.from_json(values), values.get("text_config", values)
    told = [remark.split(" ")[0] for remark in config.remarks]
    assert ("attention_dropout:" in told) == bool(values.get("attention_dropout"))
    assert set(told) <= {"yarn:", "attention_dropout:"}
    assert config.rope_theta == values.get("rope_theta", 10000.0)
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_key_that_is_not_understood_is_refused_by_its_name(model_type):
    with pytest.raises(ModelFileError) as error:
        tiny_config(model_type=model_type, rope_base=500000.0, attention_tilt=[0.5] * 99)
    text, path = str(error.value), "" if ARCHITECTURES[model_type].text is None else "text_config."
    assert f"{path}rope_base: 500000.0 is not understood, and may change what the model computes" in text
    assert f"{path}attention_tilt: [0.5, " in text and len(text) < 700
    assert f"ignore_config_keys: [{path}rope_base, {path}attention_tilt]" in text
    assert f"--ignore-config-keys {path}rope_base,{path}attention_tilt" in text
    assert tiny_config(model_type=model_type, rope_base=None).rope_theta  # null says nothing


def test_a_key_is_left_out_where_the_user_says_so():
    values = {**CONFIG, "rope_base": 5.0, "attention_tilt": 1}
    config = ModelConfig.from_json(values, ignored_keys=["rope_base", "attention_tilt", "absent"])
    assert config == tiny_config()
    assert [remark.split(" is ignored")[0] for remark in config.remarks] == [
        "rope_base: 5.0",
        "attention_tilt: 1",
        "absent: ignore_config_keys names it, but there is no such key",
    ]
    assert not {"rope_base", "attention_tilt"} & set(config.to_json())
    with pytest.raises(ModelFileError, match="attention_tilt: 1 is not understood"):
        ModelConfig.from_json(values, ignored_keys=["rope_base"])


@pytest.mark.parametrize("key", ["rope_theta", "hidden_act", "num_hidden_layers", "rope_parameters", "torch_dtype"])
def test_a_key_that_is_understood_cannot_be_left_out(key):
    with pytest.raises(ModelFileError, match=f"ignore_config_keys: {key} is understood, so it cannot be ignored"):
        ModelConfig.from_json({**CONFIG, "torch_dtype": "float32"}, ignored_keys=[key])


def test_every_key_is_in_one_table_only():
    for architecture in ARCHITECTURES.values():
        used = {
            *architecture.own_keys,
            *architecture.own_fields,
            *architecture.key_names.values(),
            *architecture.aliases,
        }
        inert = {*INERT_KEYS, *architecture.inert_keys}
        assert not inert & used and not inert & set(DROPOUT_KEYS) and not inert & set(architecture.neutral)
        for encoder in architecture.encoders.values():
            inert, read = (
                {*INERT_KEYS, *encoder.inert_keys},
                {encoder.key_names.get(name, name) for name in encoder.keys},
            )
            assert not inert & {*read, *encoder.aliases, *encoder.neutral} and not read & set(encoder.neutral)


def test_dropout_that_other_programs_apply_is_told_once(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "attention_dropout": 0.1, "hidden_dropout_prob": 0.0}))
    with caplog.at_level(logging.WARNING, logger="erniekit"):
        ModelConfig.from_folder(tmp_path)
        config = ModelConfig.from_folder(tmp_path)
    expected = "attention_dropout: 0.1 has no effect here; the run's attention_probs_dropout_prob decides"
    assert config.remarks == (expected,)
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / 'config.json'}: {expected}"]


# rope_parameters of transformers 5


def test_either_form_of_the_rotary_keys_is_read_and_both_are_written():
    before = tiny_config(model_type="llama", rope_theta=5e5, rope_scaling=YARN)
    since = tiny_config(model_type="llama", rope_parameters={**YARN, "rope_theta": 5e5})
    both = tiny_config(
        model_type="llama", rope_theta=500000, rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 5e5}
    )
    inside = tiny_config(model_type="llama", rope_scaling={**YARN, "rope_theta": 5e5})  # as transformers 5 reads it
    assert before == since == both == inside
    for config in (before, since, both, inside):
        written = config.to_json()
        assert (written["rope_theta"], written["rope_scaling"]) == (5e5, YARN)
        assert written["rope_parameters"] == {**YARN, "rope_theta": 5e5}
    plain = tiny_config(model_type="llama", rope_parameters={"rope_type": "default", "rope_theta": 3e4})
    assert (plain.rope_theta, plain.rope_scaling) == (3e4, None)
    assert tiny_config(model_type="llama", rope_theta=3e4, rope_scaling=None, rope_parameters={}) == plain


def test_the_weights_type_is_written_under_both_names():
    written = tiny_config(model_type="llama", dtype="bfloat16").to_json()
    assert written["dtype"] == written["torch_dtype"] == "float32"


def test_a_renamed_key_is_read_and_written_under_both_names():
    config = tiny_config(model_type="qwen3_moe", num_local_experts=12)
    assert config.moe_num_experts == 12
    written = config.to_json()
    assert written["num_experts"] == written["num_local_experts"] == 12
    with pytest.raises(ModelFileError, match="num_experts: 9 contradicts num_local_experts: 12; keep the right one"):
        tiny_config(model_type="qwen3_moe", num_experts=9, num_local_experts=12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta: 10000.0 contradicts rope_parameters.rope_theta: 500000.0; keep the right one",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {**YARN, "rope_theta": 5e5}},
            "rope_theta: 10000.0 contradicts rope_scaling.rope_theta: 500000.0",
        ),
        ({"rope_scaling": None, "rope_parameters": YARN}, "rope_scaling: None contradicts rope_parameters: {"),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2}}, "contradicts rope_parameters: {"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling: type 'linear' contradicts rope_type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5 is not supported"),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 1.0 contradicts rope_parameters.partial_rotary_factor: 0.5",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters: rope_type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters: rope_type ['yarn'] is not supported"),
        ({"rope_parameters": {"rope_theta": "5e5"}}, "rope_theta: expected float, got '5e5'"),
        ({"rope_parameters": 5}, "rope_parameters: expected dict, got 5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of parameters, but here are several"),
        (
            {"rope_parameters": {**YARN, "tilt": 2}},
            "rope_parameters: tilt is not understood for yarn, and may change what the model computes",
        ),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section is not understood"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor must be a positive number for yarn, got None"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate must be true or false for yarn, got 1"),
    ],
)
def test_rotary_keys_that_contradict_or_ask_for_more_are_refused(change, message):
    with pytest.raises(ModelFileError) as error:
        tiny_config(model_type="llama", **change)
    assert message in str(error.value)


def test_the_length_that_transformers_5_adds_to_yarn_is_not_taken_for_a_ratio():
    # transformers 4 would take max_position_embeddings / 128 = 1 for the factor
    config = tiny_config(model_type="llama", rope_parameters={**YARN, "original_max_position_embeddings": 128})
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0}
    assert config.remarks == ()


@pytest.fixture
def two_ropes(monkeypatch):
    """A family whose layers have two rope tables, as Gemma 3's."""
    sets = {"full_attention": RopeKeys(), "sliding_attention": RopeKeys("rope_local_base_freq", None)}
    own = {"rope_local_base_freq": Key(float, default=10000.0)}
    monkeypatch.setitem(ARCHITECTURES, "two", Architecture("two", "Two", own_keys=own, rope_sets=sets))


def test_each_type_of_layer_has_its_set_of_rotary_keys(two_ropes):
    nested = {
        "full_attention": {**YARN, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    since = tiny_config(model_type="two", rope_parameters=nested)
    before = tiny_config(model_type="two", rope_theta=1e6, rope_scaling=YARN, rope_local_base_freq=5e3)
    assert since == before and since.own == {"rope_local_base_freq": 5e3}
    assert since.to_json()["rope_parameters"] == nested
    for rope, message in (
        ({"rope_theta": 1e6}, "expected a set for each of full_attention, sliding_attention, got rope_theta"),
        ({"sliding_attention": YARN}, "rope_parameters.sliding_attention: rope_type 'yarn' is not supported there"),
        ({"linear_attention": {"rope_theta": 1e6}}, "got linear_attention"),
    ):
        with pytest.raises(ModelFileError) as error:
            tiny_config(model_type="two", rope_parameters=rope)
        assert message in str(error.value)


def test_messages_are_short_and_do_not_steer_the_terminal():
    deep = []
    for _ in range(900):
        deep = [deep]
    hostile = {"\x1b[31m": 1, "\ud800": 2, "k" * 500: "\x1b]0;title\x07" * 99, "deep": deep}
    for change in (
        hostile,
        {"hidden_size": "\x1b[2J" * 99},
        {"rope_scaling": {"type": "\x1b[2J"}},
        {"hidden_act": deep},
    ):
        with pytest.raises(ModelFileError) as error:
            tiny_config(model_type="llama", **change)
        text = str(error.value)
        assert text.replace("\n", "").isprintable() and len(text) < 2000


ODD_VALUES = [
    None, True, False, 0, 1, -1, 7, 99999, 2**31, 10**40, 0.5, 1e-300, 1e308, float("inf"), float("nan"), "", "yarn",
    "\x1b[31m", [], [1], [None], {}, {"a": 1}, {"type": 5}, {"rope_type": float("nan")}, {"full_attention": {}},
    {"rope_type": "yarn", "factor": 3e38, "original_max_position_embeddings": 2e-38, "beta_fast": 1e38},
    {"rope_type": "yarn", "rope_theta": 1.0000001, "factor": 1e-30, "mscale": 1e30, "mscale_all_dim": 1e-30},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 2,
     "original_max_position_embeddings": 1},
]  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_values_are_either_refused_or_read_and_written(data):
    values = dict(data.draw(st.sampled_from(list(PUBLISHED_CONFIGS.values()))))
    part = data.draw(st.sampled_from([None, *(key for key in ("text_config", "audio_config") if key in values)]))
    changed = values if part is None else dict(values[part])
    keys = st.sampled_from(
        [*changed, *ARCHITECTURES["qwen3_moe"].aliases, "rope_parameters", "rope_scaling", "unknown"]
    )
    changed |= data.draw(st.dictionaries(keys, st.sampled_from(ODD_VALUES), min_size=1, max_size=3))
    if part is not None:
        values[part] = changed
    try:
        config = ModelConfig.from_json(values)
    except ModelFileError as error:
        assert str(error).replace("\n", "").isprintable()
        return
    assert ModelConfig.from_json(config.to_json()) == config
    tables = config.architecture.rope_tables(config) if config.head_dim < 10_000 else ()
    assert all(math.isfinite(number) for table in tables for number in (*table.per_pair, table.magnitude))


# numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": float("inf")}, "rope_theta: must be at most 3.4e+38, got inf"),
        ({"rope_theta": 1e-300}, "rope_theta: must be more than 1, got 1e-300"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a number, got nan"),
        ({"rms_norm_eps": 1e308}, "rms_norm_eps: must be at most 1, got 1e+308"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps: must be positive, got 1e-300"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be positive, got nan"),
        ({"initializer_range": 1e38}, "initializer_range: must be at most 1,000"),
        ({"num_hidden_layers": 99999}, "num_hidden_layers: must be at most 2,000, got 99999"),
        ({"moe_num_experts": 99999}, "moe_num_experts: must be at most 10,000, got 99999"),
        ({"num_hidden_layers": 2000, "moe_num_experts": 5000}, "x moe_num_experts 5,000: at most 30,000"),
        ({"moe_norm_min": float("inf")}, "moe_norm_min: must be at most 3.4e+38, got inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-320}}, "factor must be a positive number"),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(change, message):
    with pytest.raises(ModelFileError) as error:
        tiny_config(model_type="ernie4_5_moe", **change)
    assert message in str(error.value)


# dictionaries within a file

ENCODER = {"hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 2, "max_source_positions": 12}
VOXTRAL = {"model_type": "voxtral", "audio_token_id": 7, "audio_config": ENCODER, "text_config": {"vocab_size": 60}}
QWEN2_AUDIO = {"model_type": "qwen2_audio", "audio_token_index": 5, "text_config": {"vocab_size": 60}}


def _text(**changes):
    return {**VOXTRAL, "text_config": changes}


def _encoder(**changes):
    return {**VOXTRAL, "audio_config": {**ENCODER, **changes}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (_text(hidden_size="8"), "text_config.hidden_size: expected int, got '8'"),
        ({**VOXTRAL, "text_config": 5}, "text_config: expected dict, got 5"),
        (_text(model_type="mistral"), "text_config.model_type: 'mistral' is not supported; only 'llama' is"),
        (_text(num_attention_heads=9), "text_config.num_attention_heads 9 is not a multiple"),
        (_text(hidden_act="relu"), "text_config.hidden_act: 'relu' is not supported"),
        (_text(tilt=1), "text_config.tilt: 1 is not understood"),
        (_text(quantization_config={"bits": 4}), "text_config.quantization_config: it stands beside text_config"),
        (_encoder(foo=2), "ignore_config_keys: [audio_config.foo]"),
        (_encoder(hidden_size=0), "audio_config.hidden_size: must be positive, got 0"),
        (_encoder(model_type="beats"), "audio_config.model_type: 'beats' is not supported; only 'voxtral_encoder' is"),
        (_encoder(dropout=0.1), "audio_config.dropout: 0.1 is not supported"),
        (_encoder(layerdrop=0.1), "audio_config.layerdrop: 0.1 is not supported"),
        (_encoder(scale_embedding=True), "audio_config.scale_embedding: True is not"),
        (
            _encoder(activation_function="relu"),
            "audio_config.activation_function: 'relu' is not supported; only 'gelu'",
        ),
        (_encoder(num_attention_heads=3), "of the encoder are not a multiple of its 3"),
        (_encoder(intermediate_size=33), "33 is not a multiple of hidden_size 8"),
        (_encoder(max_source_positions=13), "13 is not a multiple of the 4 states"),
        ({**VOXTRAL, "audio_token_id": None}, "audio_token_id: missing"),
        ({**VOXTRAL, "audio_token_id": 60}, "audio_token_id: 60 is none of the 60 tokens of text_config"),
        ({**VOXTRAL, "projector_hidden_act": "relu"}, "projector_hidden_act: 'relu' is not supported; only 'gelu' is"),
        ({**VOXTRAL, "vision_config": {}}, "vision_config: {} is not understood"),
        ({**QWEN2_AUDIO, "audio_token_id": 6}, "audio_token_index: 5 contradicts audio_token_id: 6"),
        (
            {**QWEN2_AUDIO, "audio_config": {"encoder_layers": 2, "num_hidden_layers": 3}},
            "audio_config.encoder_layers: 2 contradicts num_hidden_layers: 3",
        ),
        ({**QWEN2_AUDIO, "audio_config": {"hidden_size": 8}}, "audio_config.hidden_size: 8 is not understood"),
        ({**QWEN2_AUDIO, "audio_config": {"max_source_positions": 1}}, "must be at least 2, which are pooled, got 1"),
    ],
)
def test_what_is_wrong_in_a_dictionary_is_told_with_its_path(values, message):
    with pytest.raises(ModelFileError) as error:
        ModelConfig.from_json(values)
    assert message in str(error.value)


def test_absent_dictionaries_have_the_defaults_of_their_classes():
    voxtral = ModelConfig.from_json({"model_type": "voxtral", "audio_token_id": 24})
    assert (voxtral.hidden_size, voxtral.num_hidden_layers, voxtral.head_dim, voxtral.rope_theta) == (
        3072,
        30,
        128,
        1e8,
    )
    qwen = ModelConfig.from_json({"model_type": "qwen2_audio", "text_config": None})
    assert (qwen.hidden_size, qwen.intermediate_size, qwen.rms_norm_eps) == (4096, 22016, 1e-6)
    assert qwen.own["audio_token_index"] == 151646 and qwen.own["audio_config"] == voxtral.own["audio_config"]
    assert qwen.own["audio_config"].num_hidden_layers == 32


def test_keys_of_a_dictionary_are_left_out_where_the_user_says_so():
    values = {**VOXTRAL, "audio_config": {**ENCODER, "foo": 2}, "text_config": {"vocab_size": 60, "tilt": 1}, "bar": 3}
    ignored = ["audio_config.foo", "text_config.tilt", "bar"]
    config = ModelConfig.from_json(values, ignored_keys=ignored)
    assert config == ModelConfig.from_json(VOXTRAL)
    assert sorted(remark.split(" is ignored")[0] for remark in config.remarks) == [
        "audio_config.foo: 2",
        "bar: 3",
        "text_config.tilt: 1",
    ]
    written = config.to_json()
    assert "bar" not in written and "foo" not in written["audio_config"] and "tilt" not in written["text_config"]


def test_what_a_file_says_around_its_dictionaries_is_kept_and_copies_follow_them():
    values = {**VOXTRAL, "vocab_size": 99, "transformers_version": "4.55.4", "tie_word_embeddings": True}
    config = ModelConfig.from_json(values)
    assert not config.tie_word_embeddings and config.vocab_size == 60  # text_config decides
    written = config.to_json()
    assert (written["vocab_size"], written["hidden_size"], written["transformers_version"]) == (60, 3072, "4.55.4")
    assert written["text_config"]["model_type"] == "llama" and "architectures" not in written["text_config"]
    assert written["text_config"]["rope_parameters"] == {"rope_theta": 1e8, "rope_type": "default"}
    assert ModelConfig.from_json(QWEN2_AUDIO).to_json()["audio_config"]["num_hidden_layers"] == 32
