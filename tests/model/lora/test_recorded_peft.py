"""Adapters against logits and gradients recorded from peft (tests/parity/record_peft.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.lora.lora import load_adapters, merge_adapters, named_adapter_weights, save_adapters
from erniekit.model.storage.safetensors import SafetensorsFile, write_safetensors

from ..tiny import logits_of, pack

VECTORS = sorted(Path(__file__).parent.glob("peft_*.npz"))


def put_part(vector, part, path):
    tensors = {name.removeprefix(part): np.array(vector[name]) for name in vector if name.startswith(part)}
    write_safetensors(path, {name: values.shape for name, values in tensors.items()}, tensors.items())


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_adapters_reproduce_the_recorded_run(path, tmp_path):
    vector = np.load(path, allow_pickle=False)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    put_part(vector, "weight/", tmp_path / "model.safetensors")
    put_part(vector, "adapter/", adapters / "adapter_model.safetensors")
    (adapters / "adapter_config.json").write_bytes(vector["adapter_config"].tobytes())
    decoder = build_model(ModelConfig.from_json(json.loads(vector["config"].tobytes())), tmp_path)
    assert np.abs(logits_of(decoder, vector["ids"]) - vector["logits"]).max() > 0.1
    load_adapters(decoder, adapters)

    hidden = decoder(*pack(vector["ids"], [len(vector["ids"])]))
    np.testing.assert_allclose(decoder.head(hidden).numpy()[0], vector["logits"], atol=1e-4)
    token_loss(decoder, hidden, paddle.to_tensor(vector["labels"][None])).loss_sum.backward()
    gradients = {name.removeprefix("gradient/"): vector[name] for name in vector if name.startswith("gradient/")}
    own = named_adapter_weights(decoder)
    assert len(own) == len(gradients)
    for name, parameter in own.items():
        theirs = f"base_model.model.{name}"
        expected = (gradients[theirs] if theirs in gradients else gradients[f"{theirs}.weight"]).T
        assert np.abs(parameter.grad.numpy() - expected).max() < 1e-3 * np.abs(expected).max(), name

    save_adapters(decoder, tmp_path / "again", "base")
    again = SafetensorsFile(tmp_path / "again" / "adapter_model.safetensors")
    recorded = {name.removeprefix("adapter/"): vector[name] for name in vector if name.startswith("adapter/")}
    assert set(again.names()) == set(recorded)
    for name, values in recorded.items():
        np.testing.assert_array_equal(again.read(name), values, err_msg=name)
    theirs = json.loads(vector["adapter_config"].tobytes())
    ours = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "peft_type", "task_type"):
        assert ours[key] == theirs[key], key
    assert set(ours["target_modules"]) == set(theirs["target_modules"])
    merge_adapters(decoder)
    np.testing.assert_allclose(logits_of(decoder, vector["ids"]), vector["logits"], atol=1e-4)
