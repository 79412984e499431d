"""Adapters of models that listen, against peft: encoder, projector and decoder, files both ways, merged models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from erniekit.data.batch import Batch
from erniekit.model.architectures.parts import part_of
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import load_adapters, merge_adapters, named_adapters, save_adapters
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.weights import named_weights, save_model_folder, weight_reader
from erniekit.training.objectives.forward import batch_context, embedding_inputs
from tests.model.tiny_audio import FAMILIES, audio_batch, audio_config

from .test_lora import stir, stir_torch

pytestmark = pytest.mark.parity

CLASSES = {
    "voxtral": transformers.VoxtralForConditionalGeneration,
    "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
}
TARGETS = ("audio_tower", "multi_modal_projector", "q_proj", "down_proj")


def our_logits(decoder: Decoder, batch: Batch) -> np.ndarray:
    decoder.eval()
    with paddle.no_grad():
        hidden = decoder.forward_layers(decoder.embed(embedding_inputs(decoder, batch)), batch_context(decoder, batch))
        return decoder.head(decoder.norm(hidden)).numpy()


def their_logits(model: torch.nn.Module, family: str, batch: Batch) -> np.ndarray:
    arrays = batch.arrays
    features = torch.tensor(arrays["audio_features"], dtype=next(model.parameters()).dtype)
    inputs = {"input_ids": torch.tensor(arrays["input_ids"]), "input_features": features}
    if family == "qwen2_audio":
        inputs["attention_mask"] = torch.ones(batch.shape, dtype=torch.int64)
        inputs["feature_attention_mask"] = torch.tensor(
            np.arange(arrays["audio_features"].shape[2]) < arrays["audio_frames"][:, None]
        ).long()
    with torch.no_grad():
        return model(**inputs).logits.numpy()


@pytest.fixture
def base(family: str, tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    save_model_folder(build_model(audio_config(family), None, seed=5), folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_our_adapters_of_every_part_and_transformers_what_they_merge_to(
    family: str, base: Path, tmp_path: Path
) -> None:
    settings = LoraSettings(2, 4.0, target_modules=TARGETS)
    ours = build_model(audio_config(family), base, lora=settings)
    parts = {part_of(ours.config.architecture, path) for path in named_adapters(ours)}
    assert parts == {"audio", "aligner", "llm"}
    stir(ours)
    save_adapters(ours, tmp_path / "adapters", str(base))
    batch = audio_batch(ours.config, 2, 7)
    plain = CLASSES[family].from_pretrained(base).eval()
    before = their_logits(plain, family, batch)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
    expected = their_logits(theirs, family, batch)
    assert np.abs(expected - before).max() > 0.1
    # norms over 8 channels of states that hardly differ make float32's rounding 1.8e-4, so both compute in float64
    np.testing.assert_allclose(
        our_logits(ours.to(dtype="float64"), batch), their_logits(theirs.double(), family, batch), atol=1e-5
    )
    ours.to(dtype="float32")
    stored, read = read_adapters(tmp_path / "adapters", ours.config), weight_reader(ours.config, base)
    is_linear = ours.config.architecture.is_linear
    original = {name: read(name).T if is_linear(name) else read(name) for name in named_weights(ours)}
    streamed = {name: stored.merge(name, values) for name, values in original.items()}
    merge_adapters(ours)
    save_model_folder(ours, tmp_path / "merged")
    for name, values in load_file(tmp_path / "merged" / "model.safetensors").items():
        np.testing.assert_allclose(streamed[name], values, atol=1e-6, err_msg=name)  # what `erniekit export` writes
    merged = CLASSES[family].from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(their_logits(merged, family, batch), expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_that_peft_trains_on_every_part_load_here(family: str, base: Path, tmp_path: Path) -> None:
    plain = CLASSES[family].from_pretrained(base)
    linears = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "linear", "linear_1", "linear_2", "up_proj"]
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=linears)
    theirs = peft.get_peft_model(plain, options).eval()
    stir_torch(theirs)
    theirs.save_pretrained(tmp_path / "adapters")
    ours = build_model(audio_config(family), base)
    assert load_adapters(ours, tmp_path / "adapters")
    batch = audio_batch(ours.config, 1, 8)
    np.testing.assert_allclose(our_logits(ours, batch), their_logits(theirs, family, batch), atol=1e-4)
