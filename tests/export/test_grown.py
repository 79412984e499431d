"""Exporting a model that has more rows than the base it was trained from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from erniekit.export.trained_model import TrainedModel, trained_config
from erniekit.export.trained_weights import open_trained_weights, reference_types
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import save_adapters
from erniekit.model.storage.safetensors import SafetensorsFile, write_safetensors
from erniekit.model.vocabulary import grow, grown_vocabulary
from erniekit.model.weights import save_model_folder
from tests.model.tiny import tiny_model


@pytest.mark.parametrize("lora", [None, LoraSettings(2, 4.0)], ids=["all weights", "adapters"])
def test_weights_keep_the_type_of_the_base(lora: LoraSettings | None, tmp_path: Path) -> None:
    """The base is stored in float16, and its embedding has fewer rows."""
    base, trained = tmp_path / "base", tmp_path / "trained"
    save_model_folder(tiny_model(), base)
    stored = SafetensorsFile(base / "model.safetensors")
    tensors = {name: stored.read(name).astype(np.float16) for name in stored.names()}
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(base / "model.safetensors", shapes, tensors.items(), {"format": "pt"}, np.float16)
    config = ModelConfig.from_folder(base)
    model = build_model(grow(config, grown_vocabulary(config, 53, 10)), base, lora=lora)
    if lora is None:
        save_model_folder(model, trained)
    else:
        save_adapters(model, trained, str(base))
    found = TrainedModel(trained, lora is not None, base, str(base))
    assert trained_config(found).vocab_size == 64
    folder, types = reference_types(found, trained_config(found))
    assert folder == base and set(types.values()) == {"F16"}
    values = dict(open_trained_weights(found).read())["model.embed_tokens.weight"]
    assert values.shape == (64, 16)
    np.testing.assert_array_equal(values[:53], tensors["model.embed_tokens.weight"].astype(np.float32))
