"""Grown vocabularies against transformers' `resize_token_embeddings` and peft's trainable tokens."""

from __future__ import annotations

import numpy as np
import paddle
import peft
import pytest
import torch
import transformers

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.head import token_loss
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import merge_adapters, named_adapter_weights, save_adapters
from erniekit.model.vocabulary import grow, grown_vocabulary
from erniekit.model.weights import named_weights, save_model_folder

from .families import VOCABULARY, random_model
from .test_decoder import our_hidden
from .test_lora import stir, stir_torch

pytestmark = pytest.mark.parity

COUNT, SIZE = 9, 128  # of new tokens; of rows, 61 + 9 = 70 rounded up
IDS = np.random.default_rng(3).integers(1, VOCABULARY + COUNT, 40)
LABELS = np.random.default_rng(4).integers(1, VOCABULARY + COUNT, 40)
FAMILIES = {
    "tied": ("ernie4_5", {"tie_word_embeddings": True}),
    "untied": ("llama", {}),
    "mixture of experts": ("qwen3_moe", {}),
}
SETTINGS = {
    "LoRA": (LoraSettings(4, 8.0), {}),
    "DoRA and rsLoRA": (LoraSettings(3, 4.0, rslora=True, dora=True), {"use_dora": True, "use_rslora": True}),
}
NEW_IDS = list(range(VOCABULARY, VOCABULARY + COUNT))
every_family = pytest.mark.parametrize(("family", "shape"), FAMILIES.values(), ids=FAMILIES.keys())
every_kind = pytest.mark.parametrize(("settings", "options"), SETTINGS.values(), ids=SETTINGS.keys())


def base_model(family, shape, folder):
    theirs = random_model(family, **shape)
    theirs.save_pretrained(folder, safe_serialization=True)
    return theirs


def grown(folder, **how):
    config = ModelConfig.from_folder(folder)
    return grow(config, grown_vocabulary(config, VOCABULARY, COUNT, **how))


def resized(model, size=VOCABULARY + COUNT):
    """The model as a user of transformers grows it."""
    model.resize_token_embeddings(size)
    return model


def with_linear_rows(model):
    """Let peft 0.17, which knows trainable tokens of embeddings only, accept those of a head of its own; later versions
    need no help."""
    head = model.get_output_embeddings()
    if not model.config.tie_word_embeddings:
        head.embedding_dim = head.in_features
    return model


def their_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS[None])).logits[0].numpy()


def our_logits(decoder):
    decoder.eval()
    with paddle.no_grad():
        return decoder.head(our_hidden(decoder, IDS, [len(IDS)])).numpy()[0]


@every_family
def test_a_grown_model_opens_in_transformers(family, shape, tmp_path):
    """Its old rows are those that `resize_token_embeddings` keeps; logits of all ids are equal."""
    theirs = base_model(family, shape, tmp_path / "base")
    ours = build_model(grown(tmp_path / "base"), tmp_path / "base")
    save_model_folder(ours, tmp_path / "grown")
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "grown", output_loading_info=True)
    assert not any(info.values()), info
    assert opened.config.vocab_size == SIZE
    np.testing.assert_allclose(our_logits(ours), their_logits(opened), atol=1e-4)
    kept = resized(theirs, SIZE)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, own = (getattr(model, name)().weight.detach().numpy()[:VOCABULARY] for model in (kept, opened))
        np.testing.assert_array_equal(own, old)


def test_the_mean_is_transformers_mean(tmp_path):
    """Its `mean_resizing` draws around the mean of the old rows; with no variance that is the mean itself."""
    theirs = base_model("llama", {}, tmp_path)
    ours = named_weights(build_model(grown(tmp_path, init="mean"), tmp_path))
    for name, module in (
        ("model.embed_tokens.weight", "get_input_embeddings"),
        ("lm_head.weight", "get_output_embeddings"),
    ):
        mean = getattr(theirs, module)().weight.detach().double().mean(0).numpy()
        np.testing.assert_allclose(ours[name][VOCABULARY:], np.tile(mean, (SIZE - VOCABULARY, 1)), atol=1e-7)


@every_family
@every_kind
def test_adapters_with_new_rows_that_we_write_load_in_peft(family, shape, settings, options, tmp_path):
    theirs = base_model(family, shape, tmp_path / "base")
    ours = build_model(grown(tmp_path / "base"), tmp_path / "base", lora=settings, seed=1)
    stir(ours)
    save_adapters(ours, tmp_path / "adapters", str(tmp_path / "base"))
    expected = our_logits(ours)[:, : VOCABULARY + COUNT]
    loaded = peft.PeftModel.from_pretrained(with_linear_rows(resized(theirs)), tmp_path / "adapters").eval()
    np.testing.assert_allclose(their_logits(loaded), expected, atol=1e-4)
    np.testing.assert_allclose(their_logits(loaded.merge_and_unload()), expected, atol=2e-4)
    merge_adapters(ours)
    np.testing.assert_allclose(our_logits(ours)[:, : VOCABULARY + COUNT], expected, atol=2e-4)


@every_family
@every_kind
def test_adapters_with_new_rows_that_peft_writes_load_here(family, shape, settings, options, tmp_path):
    """peft stores the resized matrices beside them, whole, because the base was resized; the gradients agree, too."""
    base = with_linear_rows(resized(base_model(family, shape, tmp_path / "base"), SIZE))
    for matrix in {base.get_input_embeddings().weight, base.get_output_embeddings().weight}:
        with torch.no_grad():  # rows of no token are the mean here
            matrix[VOCABULARY + COUNT :] = matrix[:VOCABULARY].double().mean(0).float()
    tokens = {"embed_tokens": NEW_IDS} | ({} if base.config.tie_word_embeddings else {"lm_head": NEW_IDS})
    linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = peft.LoraConfig(r=4, lora_alpha=6, target_modules=linears, trainable_token_indices=tokens, **options)
    theirs = peft.get_peft_model(base, lora).eval()
    stir_torch(theirs)
    generator = torch.Generator().manual_seed(6)
    rows = {name: parameter for name, parameter in theirs.named_parameters() if "trainable_tokens" in name}
    with torch.no_grad():
        for parameter in rows.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    theirs.base_model.model.name_or_path = theirs.peft_config["default"].base_model_name_or_path = str(
        tmp_path / "base"
    )
    theirs.save_pretrained(tmp_path / "adapters")
    ours = build_model(ModelConfig.from_folder(tmp_path / "base"), tmp_path / "base", adapters=tmp_path / "adapters")
    assert ours.config.vocab_size == SIZE and len(rows) == len(tokens)
    np.testing.assert_allclose(our_logits(ours), their_logits(theirs), atol=1e-4)

    logits = theirs(input_ids=torch.tensor(IDS[None])).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS), reduction="sum").backward()
    token_loss(ours, our_hidden(ours, IDS, [len(IDS)]), paddle.to_tensor(LABELS[None])).loss_sum.backward()
    for name, parameter in rows.items():
        own = name.removeprefix("base_model.model.").split(".token_adapter")[0] + ".new_rows"
        wanted, gradient = parameter.grad.numpy(), named_adapter_weights(ours)[own].grad.numpy()
        assert np.abs(gradient - wanted).max() <= 1e-3 * np.abs(wanted).max(), name
