"""Exports in few bits in transformers, by way of compressed-tensors: the same logits as here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from erniekit.export.quantized import Float8Format, PackedFormat, WeightFormat, linear_weight_shapes
from erniekit.export.trained_model import TrainedModel
from erniekit.export.trained_weights import open_trained_weights, write_weights
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.quantization.settings import Fp8, WeightOnly
from erniekit.model.weights import save_model_folder

from ..model.tiny import logits_of, tiny_model

pytestmark = pytest.mark.parity

IDS = [5, 9, 2, 40, 17, 3, 8]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
EXPERTS = {
    "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
    "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "tie_word_embeddings": False,
}  # fmt: skip


def _exported(folder: Path, form: WeightFormat) -> Path:
    target = folder / "exported"
    target.mkdir()
    weights = open_trained_weights(TrainedModel(folder, False, None, ""))
    write_weights(target, weights, dict.fromkeys(weights.shapes, "F32"), 10**9, form)
    config = {**weights.config.to_json(), "quantization_config": form.config(linear_weight_shapes(weights.config))}
    (target / "config.json").write_text(json.dumps(config))
    return target


def _theirs(folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


@pytest.mark.parametrize("algorithm", ["weight_only_int8", "weight_only_int4", "weight_only_mix"])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_integers(algorithm: str, experts: dict, tmp_path: Path) -> None:
    save_model_folder(tiny_model(seed=1, **SHAPE, **experts), tmp_path)
    target = _exported(tmp_path, PackedFormat(WeightOnly(algorithm), ModelConfig.from_folder(tmp_path).architecture))
    ours = logits_of(build_model(ModelConfig.from_folder(target), target), IDS)
    np.testing.assert_allclose(_theirs(target), ours, rtol=1e-3, atol=1e-3)
    plain = logits_of(build_model(ModelConfig.from_folder(tmp_path), tmp_path), IDS)
    assert np.abs(ours - plain).max() > 1e-2


def test_eight_bit_floats(tmp_path: Path) -> None:
    save_model_folder(tiny_model(seed=1, **SHAPE), tmp_path)
    paths = [name.removesuffix(".weight") for name in linear_weight_shapes(ModelConfig.from_folder(tmp_path))]
    averages = dict.fromkeys(paths, (20.0, 1))
    target = _exported(tmp_path, Float8Format(averages, 0))
    decoder = build_model(ModelConfig.from_folder(target), target, quantization=Fp8(hadamard_block=0))
    decoder.activation_scales.restore(averages)
    decoder.eval()
    ours = logits_of(decoder, IDS)
    difference = np.abs(_theirs(target) - ours)  # where rounding differs a code differs
    assert np.median(difference) < 1e-2 * np.abs(ours).max() and difference.max() < 0.1 * np.abs(ours).max()
