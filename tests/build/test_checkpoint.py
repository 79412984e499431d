"""What a rank writes of its own, it writes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from erniekit.build.checkpoint import LocalModelShard
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.fp8 import compute_in_fp8, read_averages
from erniekit.model.quantization.settings import Fp8
from erniekit.model.randomness import Randomness
from erniekit.training.collectives import SINGLE_PROCESS

TINY = {
    "model_type": "ernie4_5", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


def test_ranks_exchange_nothing_since_another_one_may_have_failed(tmp_path: Path) -> None:
    """A rank whose disk is full says so in its next exchange; one that still writes would take that for an answer."""

    def all_gather_object(value: Any) -> list[Any]:
        pytest.fail("exchanged")

    model = build_model(ModelConfig.from_json(TINY), None)
    linear = model.layers[0].mlp.gate_proj
    model.activation_scales = compute_in_fp8({"gate_proj": linear}, Fp8(), Randomness(0), all_gather_object)
    linear.product.end_step(3.0)
    LocalModelShard(model, SINGLE_PROCESS, adapters=False).write(tmp_path)
    assert read_averages(tmp_path) == {"gate_proj": (3.0, 1)}
