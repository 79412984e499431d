"""How linear layers are quantised, from a configuration."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.build.quantization import quantization_from
from erniekit.config import Config
from erniekit.model.quantization.settings import Fp8, WeightOnly

FP8 = {"weight_quantize_algo": "fp8_linear", "apply_hadamard": False}


@pytest.mark.parametrize(
    ("values", "quantization"),
    [
        ({}, None),
        ({"lora": True, "weight_quantize_algo": "nf4"}, WeightOnly("nf4")),
        ({"lora": True, "weight_quantize_algo": "weight_only_mix"}, WeightOnly("weight_only_mix")),
        (FP8, Fp8(hadamard_block=0)),
        (FP8 | {"apply_hadamard": True, "hadamard_block_size": 64}, Fp8(hadamard_block=64)),
        (FP8 | {"apply_online_actscale_step": 3}, Fp8(hadamard_block=0, apply_online_actscale_step=3)),
        (FP8 | {"actscale_moving_rate": 0.5}, Fp8(hadamard_block=0, actscale_moving_rate=0.5)),
        (FP8 | {"fp8_format_type": "e4m3"}, Fp8(hadamard_block=0, fp8_format_type="e4m3")),
        (FP8 | {"quant_input_grad": True}, Fp8(hadamard_block=0, quant_input_grad=True)),
        (FP8 | {"quant_weight_grad": True}, Fp8(hadamard_block=0, quant_weight_grad=True)),
    ],
    ids=str,
)
def test_quantization(values: dict[str, Any], quantization: Any) -> None:
    needed = {"model_name_or_path": "m", "output_dir": "o", "train_dataset_path": "t", "continue_training": True}
    assert quantization_from(Config.from_mapping(needed | values)) == quantization
