"""The decoder against logits, loss and gradients recorded from transformers (tests/parity/record_*.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.storage.safetensors import write_safetensors
from erniekit.model.weights import named_weights

from .tiny import pack

HERE = Path(__file__).parent
VECTORS = [HERE / "decoder_vector.npz", *sorted(HERE.glob("family_*.npz"))]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_the_decoder_reproduces_the_recorded_run(path, tmp_path):
    vector = np.load(path, allow_pickle=False)
    weights = {name.removeprefix("weight/"): vector[name] for name in vector if name.startswith("weight/")}
    shapes = {name: values.shape for name, values in weights.items()}
    write_safetensors(tmp_path / "model.safetensors", shapes, weights.items())
    config = ModelConfig.from_json(json.loads(vector["config"].tobytes()))
    decoder = build_model(config, tmp_path)

    hidden = decoder(*pack(vector["ids"], [len(vector["ids"])]))
    np.testing.assert_allclose(decoder.head(hidden).numpy()[0], vector["logits"], atol=1e-4)
    loss_sum = token_loss(decoder, hidden, paddle.to_tensor(vector["labels"][None])).loss_sum
    assert float(loss_sum) == pytest.approx(float(vector["loss"]), rel=1e-5)
    loss_sum.backward()
    for name, parameter in named_weights(decoder).items():
        gradient = parameter.grad.numpy().T if config.architecture.is_linear(name) else parameter.grad.numpy()
        expected = vector[f"gradient/{name}"]
        assert np.abs(gradient - expected).max() < 1e-3 * np.abs(expected).max(), name
