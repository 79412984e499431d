"""What a layout cannot divide is named, with what to write instead."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from erniekit.distributed.planning.divisibility import check_divisible
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.published import published_model
from erniekit.model.architectures.registry import ARCHITECTURES
from erniekit.model.quantization.settings import Fp8
from tests.model.tiny import tiny_config


def _published(size: str) -> ModelConfig:
    model = published_model(f"baidu/ERNIE-4.5-{size}-PT")
    assert model is not None
    return model


def _refusal(model: ModelConfig, topology: Topology, **how: object) -> str:
    with pytest.raises(ConfigurationError) as raised:
        check_divisible(model, topology, **{"max_seq_len": 8192, **how})
    return str(raised.value)


def test_published_models_on_their_usual_layouts() -> None:
    runs = check_divisible(
        _published("300B-A47B"),
        Topology(tensor=8, pipeline=14, expert_axis="tensor", sequence_parallel=True),
        max_seq_len=8192,
        add_tail_layers=2,
    )
    assert [len(run) for run in runs] == [4] * 13 + [2]
    assert len(check_divisible(_published("21B-A3B"), Topology(tensor=4, sharding=2), max_seq_len=8192)) == 1


def test_fewer_key_heads_than_ranks_are_refused_with_the_reason() -> None:
    text = _refusal(_published("0.3B"), Topology(tensor=4))
    assert "tensor_parallel_degree 4 does not divide num_key_value_heads 2 of the model" in text
    assert "Key heads are not replicated" in text and text.endswith("write tensor_parallel_degree: 1 or 2")
    check_divisible(_published("0.3B"), Topology(tensor=2), max_seq_len=8192)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"vocab_size": 101}, "vocab_size 101"),
        ({"intermediate_size": 33}, "intermediate_size 33"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
            "num_attention_heads 3, num_key_value_heads 3",
        ),
    ],
)
def test_sizes_that_have_no_half(shape: dict, words: str) -> None:
    text = _refusal(tiny_config(**{"vocab_size": 100, **shape}), Topology(tensor=2))
    assert f"tensor_parallel_degree 2 does not divide {words} of the model" in text
    assert "Key heads are not replicated" not in text or shape.get("num_key_value_heads", 2) < 2


def test_experts_are_divided_as_wholes() -> None:
    moe = {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 33,
        "vocab_size": 100,
    }
    model = tiny_config(**moe, moe_num_shared_experts=2, intermediate_size=33, moe_layer_start_index=0)
    check_divisible(model, Topology(tensor=2, expert_axis="tensor"), max_seq_len=64)  # 33 is no cut matrix's side
    text = _refusal(model, Topology(data=4, expert_axis="data"))
    assert "moe_num_experts 6 cannot be sharded over 4 ranks (the data-parallel degree)" in text
    assert text.endswith("a degree of 1, 2, 3, 6")


def test_everything_that_is_wrong_is_told_at_once() -> None:
    topology = Topology(tensor=8, pipeline=4, sequence_parallel=True)
    method = "layer:MyDecoderLayer"
    text = _refusal(_published("21B-A3B"), topology, max_seq_len=1001, add_tail_layers=1, pp_seg_method=method)
    assert "num_attention_heads 20, num_key_value_heads 4" in text
    assert "write max_seq_len: 1000, or sequence_parallel: false" in text
    assert "28 layers and 1 empty ones cannot be divided equally" in text


def test_blocks_of_a_rotation_are_not_divided() -> None:
    model, fp8 = _published("0.3B"), Fp8(hadamard_block=1024)
    check_divisible(model, Topology(), max_seq_len=8192, quantization=fp8)
    message = _refusal(model, Topology(tensor=2), quantization=Fp8(hadamard_block=2048))
    assert "blocks of 2048 do not divide this rank's inputs of q_proj (1,024 inputs)" in message
    assert "o_proj (1,024 inputs)" in message and "down_proj (1,536 inputs)" in message
    assert "set hadamard_block_size: 512, or apply_hadamard: false" in message
    check_divisible(model, Topology(tensor=2), max_seq_len=8192, quantization=Fp8(hadamard_block=512))
    check_divisible(model, Topology(tensor=2), max_seq_len=8192, quantization=Fp8(hadamard_block=0))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_what_is_not_refused_can_be_cut(model_type: str, degree: int) -> None:
    """A degree is refused, or it divides every axis that the architecture cuts."""
    accepted = 0
    for heads, key_heads, inner, vocabulary in itertools.product((4, 6, 12), (2, 3, 4), (24, 18), (24, 53)):
        if heads % key_heads:
            continue
        model = tiny_config(
            model_type=model_type,
            hidden_size=24,
            num_attention_heads=heads,
            num_key_value_heads=heads if model_type == "deepseek_v3" else key_heads,
            head_dim=4,
            intermediate_size=inner,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
        )
        try:
            check_divisible(model, Topology(tensor=degree), max_seq_len=24)
        except ConfigurationError:
            continue
        accepted += 1
        for name, shape in model.weight_shapes().items():
            weight = model.architecture.weight_info(name)
            axis = weight.placement().axis
            if axis is not None:
                assert (shape[::-1] if weight.is_linear else shape)[axis] % degree == 0, name
    assert accepted


def test_an_axis_that_no_size_stands_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful = replace(ARCHITECTURES["llama"], model_type="forgetful", tensor_parallel_sizes=lambda config: {})
    monkeypatch.setitem(ARCHITECTURES, "forgetful", forgetful)
    text = _refusal(tiny_config(model_type="forgetful"), Topology(tensor=2))
    assert "tensor_parallel_degree 2 does not divide these weights of forgetful: model.embed_tokens.weight" in text
