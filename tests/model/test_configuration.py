from __future__ import annotations

import json

import pytest

from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig

from .tiny import CONFIG, tiny_config


def written(tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_defaults_are_filled_in(tmp_path):
    values = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    config = ModelConfig.from_folder(written(tmp_path, values))
    assert (config.num_key_value_heads, config.head_dim) == (4, 4)
    assert (config.rope_theta, config.rms_norm_eps) == (500000.0, 1e-5)
    assert config.tie_word_embeddings and not config.use_bias


def test_what_is_read_can_be_written_and_read_again():
    config = tiny_config(bos_token_id=1, eos_token_id=2, task_specific_params={"note": "kept"}, rope_theta=10000)
    again = ModelConfig.from_json(config.to_json())
    assert again == config
    assert config.to_json()["task_specific_params"] == {"note": "kept"}
    assert config.to_json()["rope_theta"] == 10000.0


def test_parameters_are_counted():
    # embedding + 2 x (attention + MLP + 2 norms) + final norm
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16
    assert tiny_config().parameter_count() == 53 * 16 + 2 * layer + 16
    assert tiny_config(tie_word_embeddings=False).parameter_count() == 2 * 53 * 16 + 2 * layer + 16
    biases = 16 + 8 + 8 + 16 + 24 + 24 + 16
    assert tiny_config(use_bias=True).parameter_count() == 53 * 16 + 2 * (layer + biases) + 16


def test_the_published_small_model_has_its_published_size():
    # The figures of baidu/ERNIE-4.5-0.3B's config.json; the model is named after its 0.36 B parameters.
    config = tiny_config(
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
    )
    assert config.parameter_count() == 360_748_032


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: deepseek_v3, ernie4_5, "),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "16"}, "hidden_size: expected int, got '16'"),
        ({"hidden_size": 0}, "hidden_size: must be positive, got 0"),
        ({"hidden_size": 10**12}, "hidden_size: must be at most 2,147,483,647, got 1000000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 2,000"),
        ({"rope_theta": 10**400}, "rope_theta: must be at most"),
        ({"use_bias": 1}, "use_bias: expected bool, got 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected int, got True"),
        ({"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; only 'silu' is"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling: rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor must be a positive number for linear, got None"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected dict, got 'linear'"),
        ({"moe_num_experts": 64}, "moe_num_experts: 64 is not supported"),
    ],
)
def test_unusable_values_are_named(change, message):
    with pytest.raises(ModelFileError) as error:
        tiny_config(**change)
    assert message in str(error.value)


def test_all_problems_come_at_once():
    with pytest.raises(ModelFileError) as error:
        tiny_config(hidden_size=None, vocab_size="many", hidden_act="gelu")
    assert all(name in str(error.value) for name in ("hidden_size", "vocab_size", "hidden_act"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "cannot be read as JSON"),
        (b"[]", "expected a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_unreadable_files_are_named(content, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError) as error:
        ModelConfig.from_folder(tmp_path)
    assert message in str(error.value) and "config.json" in str(error.value)
