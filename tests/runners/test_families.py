"""Every family but ERNIE trains through the one path, from random weights and from files in Paddle's layout."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.storage.layouts import open_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"rope_scaling": LLAMA3, "mlp_bias": True},
    "mistral": {"sliding_window": 32, "num_key_value_heads": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(params=FAMILIES, ids=str)
def family_folder(request, tiny_model, tmp_path):
    """The tiny model's folder with another family's configuration."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"], config["tie_word_embeddings"]
    config |= {"model_type": request.param, "max_position_embeddings": 512, **FAMILIES[request.param]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_family_trains_and_its_folder_says_what_it_is(family_folder, train):
    run = train(model_name_or_path=str(family_folder), max_steps=8)
    assert run.losses[-1] < 0.8 * run.losses[0]
    config = ModelConfig.from_folder(run.output)
    assert config == ModelConfig.from_folder(family_folder)
    (architecture,) = json.loads((run.output / "config.json").read_text())["architectures"]
    assert architecture.lower() == f"{config.model_type.replace('_', '')}forcausallm"
    build_model(config, run.output)


def test_training_goes_on_from_files_in_paddles_layout(family_folder, train, tmp_path):
    """The first loss is the same from both layouts, to the last bit."""
    config = ModelConfig.from_folder(family_folder)
    first = train(model_name_or_path=str(family_folder), max_steps=2)
    shutil.copy(first.output / "model.safetensors", family_folder)
    continued = train(model_name_or_path=str(family_folder), continue_training=True, max_steps=2).losses
    weights = safetensors.numpy.load_file(family_folder / "model.safetensors")
    paddle_names = {
        name.replace("model.", "llama.", 1): np.ascontiguousarray(values.T)
        if values.ndim == 2 and "embed" not in name
        else values
        for name, values in weights.items()
    }
    safetensors.numpy.save_file(paddle_names, family_folder / "model.safetensors", {"format": "np"})
    assert open_weights(config, family_folder).layout.inputs_first
    again = train(model_name_or_path=str(family_folder), continue_training=True, max_steps=2)
    assert again.losses == continued
    assert "llama.* names, linears [in, out]" in again.said
