"""The table of published models against what their names say."""

from __future__ import annotations

import math

import pytest

from erniekit.model.architectures.published import published_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("baidu/ERNIE-4.5-0.3B-PT", 0.36),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.8),
        ("baidu/ERNIE-4.5-21B-A3B-Base-PT@main", 21.8),
        ("PaddlePaddle/ERNIE-4.5-300B-A47B-Paddle", 299),
        ("Qwen/Qwen3-0.6B", 0.596),
        ("k2-fsa/OmniVoice", 0.613),
    ],
)
def test_the_sizes_are_those_in_the_names(name: str, billions: float) -> None:
    model = published_model(name)
    assert model is not None and model.parameter_count() == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(("size", "billions"), [("21B-A3B", 3), ("300B-A47B", 47)])
def test_as_many_weights_compute_for_a_token_as_the_name_says(size: str, billions: float) -> None:
    model = published_model(f"baidu/ERNIE-4.5-{size}-PT")
    assert model is not None
    idle = model.moe_num_experts - model.moe_k
    experts = sum(math.prod(shape) for name, shape in model.weight_shapes().items() if ".experts." in name)
    active = model.parameter_count() - experts * idle // model.moe_num_experts
    assert active == pytest.approx(billions * 1e9, rel=0.15)


@pytest.mark.parametrize("name", ["baidu/ERNIE-4.5-VL-28B-A3B-PT", "ERNIE-4.5-0.3B", "models/own", "Qwen/Qwen3-4B"])
def test_other_names_are_not_guessed_at(name: str) -> None:
    assert published_model(name) is None
