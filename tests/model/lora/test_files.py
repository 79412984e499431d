"""Adapter folders: what is written, read back to the bit, and refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from erniekit.errors import ModelFileError
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.folder import base_model_of, is_adapter_folder, target_names
from erniekit.model.lora.lora import load_adapters, named_adapter_weights, named_linears, save_adapters
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.storage.safetensors import SafetensorsFile, write_safetensors

from ..tiny import logits_of, tiny_config, tiny_model
from .test_lora import IDS, KINDS, with_adapters

CONFIG = tiny_config()
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path):
    """Adapters of rank 4 on all layers, as this project writes them."""
    save_adapters(with_adapters(KINDS["LoRA"]), tmp_path, "the/base")
    return tmp_path


def change_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rewrite(folder, change, metadata=None):
    """Pass the stored tensors through `change`, as another program that writes no metadata of ours."""
    path = folder / "adapter_model.safetensors"
    file = SafetensorsFile(path)
    tensors = change({name: np.array(file.read(name)) for name in file.names()})
    del file
    write_safetensors(path, {name: value.shape for name, value in tensors.items()}, tensors.items(), metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_is_exact(kind, tmp_path):
    model = with_adapters(KINDS[kind])
    save_adapters(model, tmp_path / "first", "base")
    loaded = tiny_model()
    assert load_adapters(loaded, tmp_path / "first")
    for name, parameter in named_adapter_weights(model).items():
        np.testing.assert_array_equal(named_adapter_weights(loaded)[name].numpy(), parameter.numpy(), err_msg=name)
    for path, linear in named_linears(model).items():
        np.testing.assert_array_equal(named_linears(loaded)[path].weight.numpy(), linear.weight.numpy(), err_msg=path)
    np.testing.assert_array_equal(logits_of(loaded, IDS), logits_of(model, IDS))
    save_adapters(loaded, tmp_path / "second", "base")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_other_programs_read_the_same_model_without_our_metadata(kind, tmp_path):
    model = with_adapters(KINDS[kind])
    save_adapters(model, tmp_path, "base")
    rewrite(tmp_path, lambda tensors: tensors)
    loaded = tiny_model()
    assert load_adapters(loaded, tmp_path)
    np.testing.assert_allclose(logits_of(loaded, IDS), logits_of(model, IDS), atol=2e-5)


def test_names_and_shapes_are_those_of_peft(folder):
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    assert file.shape(f"{PREFIX}.lora_A.weight") == (4, 16)
    assert file.shape(f"{PREFIX}.lora_B.weight") == (16, 4)
    assert len(file.names()) == 2 * 14
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert config["target_modules"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert base_model_of(folder) == "the/base" and is_adapter_folder(folder)
    assert not is_adapter_folder(folder.parent)


def test_target_names_are_short_where_they_can_be():
    linears = ["a.0.q_proj", "a.1.q_proj", "a.0.up_proj", "b.proj.0"]
    assert target_names(["a.0.q_proj", "a.1.q_proj"], linears) == (["q_proj"], [])
    assert target_names(["a.0.q_proj"], linears) == (["a.0.q_proj"], [])
    assert target_names(["a.0.up_proj", "b.proj.0"], linears) == (["b.proj.0", "up_proj"], [])
    linears = ["tower.0.q_proj", "tower.0.fc1", *linears]
    assert target_names(["a.0.q_proj", "a.1.q_proj"], linears, ("tower.",)) == (["q_proj"], ["tower.0.q_proj"])
    assert target_names(["a.0.q_proj"], linears, ("tower.",)) == (["a.0.q_proj"], [])
    assert target_names(["tower.0.q_proj"], linears, ("tower.",)) == (["tower.0.q_proj"], [])
    assert target_names(["tower.0.fc1"], linears, ("tower.",)) == (["fc1"], [])


def test_a_relative_base_lies_beside_the_adapters_or_where_the_command_runs(folder, monkeypatch):
    change_config(folder, base_model_name_or_path="own/base")
    (folder / "elsewhere/own/base").mkdir(parents=True)
    monkeypatch.chdir(folder / "elsewhere")
    assert base_model_of(folder) == "own/base"
    (folder / "own/base").mkdir(parents=True)
    assert base_model_of(folder) == str(folder / "own/base")
    change_config(folder, base_model_name_or_path=None)
    assert base_model_of(folder) is None


def test_all_tensors_that_do_not_fit_are_listed(folder):
    def change(tensors):
        tensors.pop(f"{PREFIX}.lora_B.weight")
        tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 16), np.float32)
        tensors["base_model.model.model.norm.weight"] = np.zeros(16, np.float32)
        name = PREFIX.replace("q_proj", "k_proj") + ".lora_A.weight"
        tensors[name] = np.zeros((2, 16), np.float32)
        return tensors

    rewrite(folder, change)
    with pytest.raises(ModelFileError) as refused:
        read_adapters(folder, CONFIG)
    text = str(refused.value)
    assert "model.layers.0.self_attn.q_proj.lora_B: missing" in text
    assert "lm_head.lora_A.weight: the base model has no such linear layer" in text
    assert "model.norm.weight: not an adapter of a linear layer" in text
    assert "k_proj.lora_A.weight: shape [2, 16], expected [4, 16]" in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not available"),
        ({"bias": "all"}, "bias: 'all' is not available"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not available"),
        ({"trainable_token_indices": [1]}, "the vocabulary grew differently: these adapters have 1 new token, id 1"),
        ({"lora_bias": True}, "lora_bias: True is not available"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "olora"}, "has changed the base weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"some_new_setting": 3}, "some_new_setting: 3: this setting is not known here"),
        ({"r": 0}, "r: expected a positive integer, got 0"),
        ({"r": "8"}, "r: expected a positive integer, got '8'"),
        ({"lora_alpha": None}, "lora_alpha: expected a positive number"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern: expected"),
        ({"target_modules": "("}, "target_modules: '\\(' is not a regular expression"),
        ({"target_modules": 3}, "target_modules: expected a list of names"),
        ({"target_modules": ["nothing"]}, "target_modules names no linear layer"),
        ({"target_modules": ["k_proj"]}, "adapter_config.json does not name this layer"),
        ({"r": 8}, r"shape \[4, 16\], expected \[8, 16\]"),
        ({"use_dora": True}, "lora_magnitude_vector: missing"),
        ({"use_dora": "no"}, "use_dora: expected true or false, got 'no'"),
        ({"lora_dropout": "x"}, "lora_dropout: expected a number from 0 to below 1, got 'x'"),
        ({"lora_dropout": ["*"]}, "lora_dropout: expected a number"),
        ({"lora_dropout": float("nan")}, "lora_dropout: expected a number"),
        ({"layers_to_transform": "x"}, "layers_to_transform: expected a layer's number or a list of them, got 'x'"),
        ({"layers_to_transform": float("nan")}, "layers_to_transform: expected"),
        ({"layers_to_transform": [0, "1"]}, "layers_to_transform: expected"),
        ({"layers_pattern": "("}, "layers_pattern: expected a regular expression"),
        ({"layers_pattern": [3]}, "layers_pattern: expected a regular expression"),
        ({"lora_alpha": float("inf")}, "lora_alpha: expected a positive number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern: expected"),
    ],
)
def test_configurations_that_are_refused(folder, values, message):
    change_config(folder, **values)
    with pytest.raises(ModelFileError, match=message):
        read_adapters(folder, CONFIG)


def test_adapters_that_cannot_compute_are_named(folder):
    def spoil(tensors):
        tensors[f"{PREFIX}.lora_A.weight"][0, 0] = np.nan
        return tensors

    rewrite(folder, spoil)
    with pytest.raises(ModelFileError, match=rf"{PREFIX}.lora_A.weight: 1 of 64 values read are NaN"):
        read_adapters(folder, CONFIG)
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"F32", b"I32", 2))
    with pytest.raises(ModelFileError, match=r"holds I32, which are not the floats of an adapter"):
        read_adapters(folder, CONFIG)


@pytest.mark.parametrize("values", [{"modules_to_save": []}, {"peft_version": "0.17.1"}, {"init_lora_weights": "eva"}])
def test_settings_without_effect_are_taken(folder, values):
    change_config(folder, **values)
    assert read_adapters(folder, CONFIG).settings.rank == 4


def test_damaged_and_missing_files(folder):
    path = folder / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ModelFileError, match="truncated"):
        read_adapters(folder, CONFIG)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ModelFileError, match="not a safetensors file"):
        read_adapters(folder, CONFIG)
    path.unlink()
    with pytest.raises(ModelFileError, match="no such file"):
        read_adapters(folder, CONFIG)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"pickled file.*\n.*save_pretrained"):
        read_adapters(folder, CONFIG)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="expected a JSON object, got list"):
        read_adapters(folder, CONFIG)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelFileError, match="cannot be read as JSON"):
        read_adapters(folder, CONFIG)


def test_our_metadata_must_be_readable(folder):
    rewrite(folder, lambda tensors: tensors, {"erniekit": "{}"})
    with pytest.raises(ModelFileError, match="metadata 'erniekit' cannot be read"):
        read_adapters(folder, CONFIG)


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": "4"}, {"rank": 0}, {"alpha": None}, {"dropout": float("nan")}, {"init": "gaussian"}, {"rslora": 1},
        {"rank_pattern": {"q_proj": 1.5}}, {"rank_pattern": []}, {"target_modules": 3}, {"unknown": 1},
    ],
)  # fmt: skip
def test_our_metadata_is_not_trusted(folder, settings):
    own = {"settings": {**KINDS["LoRA"].to_json(), **settings}, "base_fingerprint": ""}
    rewrite(folder, lambda tensors: tensors, {"erniekit": json.dumps(own)})
    with pytest.raises(ModelFileError, match="metadata 'erniekit' cannot be read"):
        read_adapters(folder, CONFIG)


def test_metadata_of_other_adapters_is_refused(folder):
    own = {"settings": {**KINDS["LoRA"].to_json(), "init": "pissa"}, "base_fingerprint": ""}
    rewrite(folder, lambda tensors: tensors, {"erniekit": json.dumps(own)})
    with pytest.raises(ModelFileError, match=r"names other ranks than .*adapter_config\.json"):
        read_adapters(folder, CONFIG)


@pytest.mark.parametrize("name", ["\x1b[31mbase", "a\0b", "x" * 5000, "~nobody-here/base"])
def test_a_base_that_cannot_be_a_name_is_refused(folder, name):
    change_config(folder, base_model_name_or_path=name)
    with pytest.raises(ModelFileError, match=r"adapter_config\.json: base_model_name_or_path: .* is neither"):
        base_model_of(folder)


def test_another_base_is_noticed(folder):
    assert load_adapters(tiny_model(), folder)
    assert not load_adapters(tiny_model(seed=9), folder)


# paddlenlp's layout, made here by hand: [in, r] and [r, out], names that begin with the family
def paddlenlp_folder(folder, model, **config):
    folder.mkdir()
    stored = {
        name.replace("model.", "llama.", 1): parameter.numpy()
        for name, parameter in named_adapter_weights(model).items()
    }
    (folder / "lora_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "rslora": False, **config}))
    half = list(stored.items())[:9], list(stored.items())[9:]
    for number, part in enumerate(half, start=1):
        name = f"peft_model-{number:05d}-of-00002.safetensors"
        write_safetensors(folder / name, {key: value.shape for key, value in part}, part)
    return folder


def test_paddlenlp_folders(tmp_path):
    model = with_adapters(KINDS["LoRA"])
    loaded = tiny_model()
    load_adapters(loaded, paddlenlp_folder(tmp_path / "theirs", model, lora_dropout=0.1))
    np.testing.assert_array_equal(logits_of(loaded, IDS), logits_of(model, IDS))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pissa": True}, "pissa: True is not available"),
        ({"use_mora": True}, "use_mora"),
        ({"r": None}, "r: expected a positive number"),
        ({"tensor_parallel_degree": 2}, "merge_tensor_parallel"),
        ({"r": 8}, r"lora_A: shape \[16, 4\], expected \[16, 8\]"),
    ],
)
def test_paddlenlp_folders_that_are_refused(config, message, tmp_path):
    folder = paddlenlp_folder(tmp_path / "theirs", with_adapters(KINDS["LoRA"]), **config)
    with pytest.raises(ModelFileError, match=message):
        read_adapters(folder, CONFIG)


def test_paddlenlp_files_that_are_missing_pickled_or_of_another_model(tmp_path):
    model = with_adapters(LoraSettings(4, 8.0, target_modules=("q_proj",)), num_hidden_layers=12)
    folder = paddlenlp_folder(tmp_path / "theirs", model)
    with pytest.raises(
        ModelFileError, match=r"llama\.layers\.11\.self_attn\.q_proj\.lora_B: the base model has no such"
    ):
        read_adapters(folder, CONFIG)
    (folder / "peft_model-00002-of-00002.safetensors").unlink()
    index = {"weight_map": {"a": "peft_model-00001-of-00002.safetensors", "b": "peft_model-00002-of-00002.safetensors"}}
    (folder / "peft_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"shards are missing:\n +peft_model-00002"):
        read_adapters(folder, CONFIG)
    for path in folder.glob("peft_model*"):
        path.unlink()
    with pytest.raises(ModelFileError, match=r"neither peft_model\.safetensors"):
        read_adapters(folder, CONFIG)
    (folder / "lora_model_state.pdparams").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"pickled file(.|\n)*python -c "):
        read_adapters(folder, CONFIG)
