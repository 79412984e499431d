"""Exports in few bits, and adapters that were trained beside such weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.config import Config
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.export import export_model, open_trained_decoder
from erniekit.export.logit_difference import prompt_logits
from erniekit.export.trained_model import find_trained_model
from erniekit.inference.engine import ChatModel
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.codes import dequantize, quantize
from erniekit.model.quantization.formats import NF4
from erniekit.model.quantization.settings import WEIGHT_ONLY, Fp8, WeightOnly
from erniekit.model.storage.layouts import open_weights
from erniekit.model.storage.shards import open_weight_files
from erniekit.model.weights import named_weights
from tests.log_capture import captured_log

Train = Callable[..., Any]
PROMPTS = [[5], [7, 8, 9, 10], list(range(20, 40))]
FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 16, "apply_online_actscale_step": 2}


def export(folder: Path, target: Path, *overrides: str) -> str:
    with captured_log() as lines:
        export_model(folder, target, Config.load(None, overrides, verb="export"))
    return "\n".join(lines)


def read(folder: Path) -> dict[str, np.ndarray]:
    config = ModelConfig.from_folder(folder)
    stored = open_weights(config, folder)
    return {name: stored.read(name) for name in config.weight_shapes()}


@pytest.mark.parametrize("algorithm", WEIGHT_ONLY)
def test_quantized_linear_weights_are_read_as_their_codes_say(
    algorithm: str, train: Train, moe_model: Path, tmp_path: Path
) -> None:
    run, target = train(model_name_or_path=str(moe_model)), tmp_path / "exported"
    said = export(run.output, target, f"weight_quantize_algo={algorithm}", "max_shard_size=0.00005")
    assert (
        f"linear weights: {WeightOnly(algorithm)}" in said
        and "logits compared with the trained model's: largest" in said
    )
    trained, exported = read(run.output), read(target)
    config = ModelConfig.from_folder(target)
    linears = {f"{path}.weight" for path in config.linear_shapes()}
    assert len(linears) > 20
    for name, values in trained.items():
        form = (
            WeightOnly(algorithm).form(name.removesuffix(".weight"), config.architecture) if name in linears else None
        )
        expected = values if form is None else dequantize(quantize(values, form), form)
        np.testing.assert_array_equal(exported[name], expected, err_msg=name)
    files = open_weight_files(target)
    assert {files[name].stored(name).dtype for name in files if name.endswith("_packed")} == {"I32"}
    assert not linears & files.keys() and len(set(files.values())) > 1
    # a model that goes on from there, and is saved, has float weights
    decoder = build_model(ModelConfig.from_folder(target), target)
    assert "quantization_config" not in decoder.config.to_json()
    np.testing.assert_array_equal(
        named_weights(decoder)["model.layers.0.mlp.up_proj.weight"].numpy().T,
        exported["model.layers.0.mlp.up_proj.weight"],
    )


def test_what_config_json_says_of_a_mixture(train: Train, moe_model: Path, tmp_path: Path) -> None:
    run, target = train(model_name_or_path=str(moe_model)), tmp_path / "exported"
    export(run.output, target, "weight_quantize_algo=weight_only_mix")
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    groups = [
        (
            group["weights"]["num_bits"],
            group["weights"].get("group_size"),
            any("experts" in t for t in group["targets"]),
        )
        for group in config["config_groups"].values()
    ]
    assert sorted(groups, key=str) == [(4, 32, True), (4, 8, True), (8, None, True)]
    own = tmp_path / "nf4"
    export(run.output, own, "weight_quantize_algo=nf4")
    assert json.loads((own / "config.json").read_text())["quantization_config"]["quant_method"] == "erniekit"


def test_packed_tensors_that_do_not_fit_are_refused(train: Train, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    export(train().output, target, "weight_quantize_algo=weight_only_int4")
    path = target / "model.safetensors"
    (target / "manifest.json").unlink()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"o_proj.weight_scale", b"o_proj.weight_scald"))
    with pytest.raises(ModelFileError, match=r"o_proj\.weight_packed lacks .*o_proj\.weight_scale"):
        read(target)


@pytest.mark.parametrize("block", [0, 16])
def test_eight_bit_floats_have_static_scales(block: int, train: Train, tmp_path: Path) -> None:
    run, target = train(**{**FP8, "apply_hadamard": block > 0}), tmp_path / "exported"
    said = export(run.output, target, "weight_quantize_algo=fp8_linear")
    assert "linear weights: e4m3" in said and "positions of 4 prompts, both through 8-bit floats" in said
    difference = float(re.findall(r"largest difference (\S+) ", said)[0])
    assert difference < 0.05  # a value between two codes falls to either side
    files = open_weight_files(target)
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config.get("hadamard_block_size", 0)) == (
        ("erniekit", 16) if block else ("compressed-tensors", 0)
    )
    averages = json.loads((run.output / "activation_scales.json").read_text())
    trained, exported = read(run.output), read(target)
    for path, (average, _) in averages.items():
        name = f"{path}.weight"
        assert files[name].stored(name).dtype == "F8_E4M3"
        assert files[f"{path}.input_scale"].read(f"{path}.input_scale") == pytest.approx(average / 448, rel=1e-6)
        error = np.square(exported[name] - trained[name]).mean() / np.square(trained[name]).mean()
        assert 1e-5 < error < 2e-3
        scale = files[f"{path}.weight_scale"].read(f"{path}.weight_scale")
        if not block:
            assert scale == pytest.approx(np.abs(trained[name]).max() / 448, rel=1e-6)
    assert len(averages) == 14
    # what was exported computes through FP8 what was trained through it
    logits = [
        prompt_logits(build_model(ModelConfig.from_folder(folder), folder, quantization=Fp8(block)).eval(), PROMPTS)
        for folder in (run.output, target)
    ]
    for found, expected in zip(*logits, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_eight_bit_floats_need_a_training_through_them(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs the scales of activations[\s\S]*weight_only_int8"):
        export(train().output, tmp_path / "exported", "weight_quantize_algo=fp8_linear")
    assert not (tmp_path / "exported").exists()


def test_adapters_are_merged_onto_the_rounded_base(train: Train, tiny_base: Path, tmp_path: Path) -> None:
    values = {"lora": True, "model_name_or_path": str(tiny_base), "continue_training": True}
    run = train(**values, weight_quantize_algo="nf4", lora_target_modules="q_proj")
    target = tmp_path / "exported"
    said = export(run.output, target)
    assert "the same most likely token at" in said
    base, merged = read(tiny_base), read(target)
    form = NF4
    up = "model.layers.1.mlp.up_proj.weight"  # without an adapter, and yet the model was trained beside its codes
    np.testing.assert_allclose(merged[up], dequantize(quantize(base[up], form), form), rtol=1e-6)
    model = find_trained_model(run.output, Config.load(None, [], verb="export"))
    trained = prompt_logits(open_trained_decoder(model, ModelConfig.from_folder(tiny_base)), PROMPTS)
    for found, expected in zip(prompt_logits(build_model(model_config(target), target), PROMPTS), trained, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    chat = ChatModel.load(run.output).decoder
    for found, expected in zip(prompt_logits(chat, PROMPTS), trained, strict=True):
        np.testing.assert_array_equal(found, expected)


def model_config(folder: Path) -> ModelConfig:
    return ModelConfig.from_folder(folder)
