"""Where weights lie on ranks: every weight of every family, against what its layers are made with."""

from __future__ import annotations

import pytest

from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.architectures.sharding import Placement
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings, adapter_shapes
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.model.weights import named_weights

from .tiny import tiny_config

MOE = {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
       "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1}  # fmt: skip
FAMILIES = {
    "ernie": {},
    "untied, biases": {"tie_word_embeddings": False, "use_bias": True},
    "experts": MOE,
    "predictions": {**MOE, "num_nextn_predict_layers": 1},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slice_of_a_model_has_the_slices_that_the_table_says(family: str) -> None:
    """The table and the layers say the same of every weight: which axis is cut, and that nothing else is."""
    config = tiny_config(vocab_size=56, **FAMILIES[family])
    weights = named_weights(build_model(config, None, tp=TensorParallel(rank=1, size=2)))
    assert list(weights) == list(config.weight_shapes())
    for name, shape in config.weight_shapes().items():
        expected = list(shape[::-1] if config.architecture.is_linear(name) else shape)
        axis = config.architecture.placement(name).axis
        if axis is not None:
            expected[axis] //= 2
        assert weights[name].shape == expected, name


def test_slices_of_random_weights_make_up_those_of_one_process() -> None:
    config = tiny_config(vocab_size=56)
    whole = named_weights(build_model(config, None, seed=5))
    slices = [named_weights(build_model(config, None, seed=5, tp=TensorParallel(rank, 2))) for rank in range(2)]
    for name, weight in whole.items():
        for rank, own in enumerate(slices):
            expected = TensorParallel(rank, 2).local_shard(weight.numpy(), config.architecture.placement(name).axis)
            assert (own[name].numpy() == expected).all(), name


@pytest.mark.parametrize(
    ("name", "place", "with_sequence"),
    [
        ("model.layers.0.self_attn.q_proj.weight", Placement(axis=1), Placement(axis=1)),
        ("model.layers.0.self_attn.q_proj.bias", Placement(axis=0), Placement(axis=0)),
        ("model.layers.0.self_attn.o_proj.weight", Placement(axis=0), Placement(axis=0)),
        ("model.layers.0.self_attn.o_proj.bias", Placement(), Placement(partial=True)),
        ("model.layers.0.self_attn.q_norm.weight", Placement(partial=True), Placement(partial=True)),
        ("model.layers.0.input_layernorm.weight", Placement(), Placement(partial=True)),
        ("model.norm.weight", Placement(), Placement(partial=True)),
        ("model.embed_tokens.weight", Placement(axis=0), Placement(axis=0)),
        ("lm_head.weight", Placement(axis=0), Placement(axis=0)),
        ("model.layers.1.mlp.gate.weight", Placement(), Placement(partial=True)),
        ("model.layers.1.mlp.experts.3.up_proj.weight", Placement(expert=3), Placement(partial=True, expert=3)),
        ("model.layers.1.mlp.shared_experts.down_proj.weight", Placement(axis=0), Placement(axis=0)),
        ("model.mtp_linear_proj.0.weight", Placement(), Placement(partial=True)),
        ("model.layers.0.mlp.up_proj.lora_A", Placement(partial=True), Placement(partial=True)),
        ("model.layers.0.mlp.up_proj.lora_B", Placement(axis=1), Placement(axis=1)),
        ("model.layers.0.mlp.up_proj.lora_magnitude_vector", Placement(axis=0), Placement(axis=0)),
        ("model.layers.0.mlp.down_proj.lora_A", Placement(axis=0), Placement(axis=0)),
        ("model.layers.0.mlp.down_proj.lora_B", Placement(partial=True), Placement(partial=True)),
        ("model.layers.0.mlp.down_proj.lora_magnitude_vector", Placement(partial=True), Placement(partial=True)),
    ],
)
def test_placements(name: str, place: Placement, with_sequence: Placement) -> None:
    architecture = ARCHITECTURES["qwen3" if "q_norm" in name else "ernie4_5_moe"]
    assert architecture.placement(name) == place
    assert architecture.placement(name, sequence_parallel=True) == with_sequence


def test_adapters_beside_cut_linears_are_cut_where_they_meet_the_cut() -> None:
    config = tiny_config(vocab_size=56)
    tp = TensorParallel(rank=0, size=2)
    shapes = adapter_shapes(config, LoraSettings(2, 4.0))
    for name, shape in shapes.items():
        axis = config.architecture.placement(name).axis
        assert axis is None or shape[axis] % tp.size == 0, name
