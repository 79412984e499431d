"""Tensors that hold a weight of all experts: taken apart when they are read, put together when they are written."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.trained_weights import TrainedWeights, write_weights
from erniekit.model.builder import build_model
from erniekit.model.lora.config import adapter_targets
from erniekit.model.storage.layouts import open_weights
from erniekit.model.storage.shards import open_weight_files
from erniekit.model.weights import named_weights, save_weights
from tests.model.tiny import tiny_config, tiny_model

EXPERTS, HIDDEN, INNER = 6, 16, 24
PATH = "model.layers.1.mlp.experts."


@pytest.fixture
def decoder():
    return tiny_model(model_type="gpt_oss", head_dim=4)


def test_a_file_has_gate_and_up_in_turn_for_each_expert(decoder, tmp_path):
    save_weights(decoder, tmp_path)
    files, own = open_weight_files(tmp_path), named_weights(decoder)
    assert not any(".experts.0." in name for name in files)
    both = files[f"{PATH}gate_up_proj"].read(f"{PATH}gate_up_proj")
    bias = files[f"{PATH}gate_up_proj_bias"].read(f"{PATH}gate_up_proj_bias")
    down = files[f"{PATH}down_proj"].read(f"{PATH}down_proj")
    assert both.shape == (EXPERTS, HIDDEN, 2 * INNER) and down.shape == (EXPERTS, INNER, HIDDEN)
    for expert in range(EXPERTS):
        np.testing.assert_array_equal(both[expert, :, ::2], own[f"{PATH}{expert}.gate_proj.weight"].numpy())
        np.testing.assert_array_equal(both[expert, :, 1::2], own[f"{PATH}{expert}.up_proj.weight"].numpy())
        np.testing.assert_array_equal(bias[expert, 1::2], own[f"{PATH}{expert}.up_proj.bias"].numpy())
        np.testing.assert_array_equal(down[expert], own[f"{PATH}{expert}.down_proj.weight"].numpy())


def test_what_is_written_is_read_again(decoder, tmp_path):
    save_weights(decoder, tmp_path, max_shard_bytes=9_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = named_weights(build_model(decoder.config, tmp_path))
    for name, weight in named_weights(decoder).items():
        np.testing.assert_array_equal(again[name].numpy(), weight.numpy(), err_msg=name)


def test_an_export_in_16_bits_has_the_same_tensors(decoder, tmp_path):
    save_weights(decoder, tmp_path / "run")
    stored, shapes = open_weights(decoder.config, tmp_path / "run"), decoder.config.weight_shapes()
    weights = TrainedWeights(decoder.config, shapes, lambda: ((name, stored.read(name)) for name in shapes))
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", weights, dict.fromkeys(shapes, "BF16"), 10**6)
    exported = open_weights(decoder.config, tmp_path / "out")
    for name in shapes:
        np.testing.assert_allclose(exported.read(name), stored.read(name), rtol=2**-8, atol=1e-6, err_msg=name)
    assert open_weight_files(tmp_path / "out")[f"{PATH}down_proj"].stored(f"{PATH}down_proj").dtype == "BF16"


def test_another_number_of_experts_is_refused(decoder, tmp_path):
    save_weights(decoder, tmp_path)
    with pytest.raises(ModelFileError, match=r"down_proj: shape \[6, .*expected 4 experts"):
        open_weights(tiny_config(model_type="gpt_oss", head_dim=4, num_local_experts=4), tmp_path)


def test_adapters_do_not_reach_experts_that_files_stack(decoder):
    assert not any("experts" in path for path in adapter_targets(decoder.config, ()))
    with pytest.raises(ConfigurationError, match="'gate_proj' names no linear layer"):
        adapter_targets(decoder.config, ("gate_proj",))
