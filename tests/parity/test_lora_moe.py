"""Adapters on experts against peft on transformers' Ernie4_5_MoE: files both ways, gradients."""

from __future__ import annotations

import numpy as np
import paddle
import peft
import pytest
import torch
import transformers

from erniekit.model.head import token_loss
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import (
    add_adapters,
    load_adapters,
    named_adapter_weights,
    save_adapters,
)
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.weights import save_model_folder

from .families import random_model
from .test_decoder import our_hidden, ours_from
from .test_lora import ALL, IDS, LABELS, our_logits, peft_model, stir, their_logits
from .test_moe import SHAPE, build_with_predictions

pytestmark = pytest.mark.parity

MOE = {**SHAPE, "moe_layer_start_index": 1, "moe_num_shared_experts": 1}
PEFT_KINDS = {
    "every linear layer": {},
    "DoRA": {"use_dora": True},
    "rsLoRA on experts alone": {"use_rslora": True, "target_modules": r".*\.experts\.\d+\.(gate|up|down)_proj"},
    "one expert with a rank of its own": {"rank_pattern": {r"experts\.3\.up_proj": 2}},
    "PiSSA": {"init_lora_weights": "pissa"},
}
SETTINGS = {
    "every linear layer": LoraSettings(4, 8.0),
    "DoRA": LoraSettings(4, 6.0, dora=True),
    "PiSSA and rsLoRA": LoraSettings(3, 4.0, rslora=True, init="pissa"),
    "routed experts": LoraSettings(4, 8.0, target_modules=("model.layers.*.mlp.experts.*",)),
    "shared experts and attention": LoraSettings(
        4, 8.0, target_modules=("re:.*shared_experts.*", "self_attn.q_proj", "o_proj")
    ),
    "some experts": LoraSettings(4, 8.0, target_modules=("experts.0.up_proj", "model.layers.2.mlp.experts.5.*")),
}


def moe_model():
    return random_model("ernie4_5_moe", **MOE)


@pytest.mark.parametrize("options", PEFT_KINDS.values(), ids=PEFT_KINDS.keys())
def test_adapters_that_peft_writes_load_here(options, tmp_path):
    base = moe_model()
    ours = ours_from(base, tmp_path)
    without = our_logits(ours)
    theirs = peft_model(base, **options)
    theirs.save_pretrained(tmp_path / "adapters")
    assert load_adapters(ours, tmp_path / "adapters")
    expected = their_logits(theirs)
    near = 1e-3 if "init_lora_weights" in options else 1e-4  # peft takes the singular values in float32
    np.testing.assert_allclose(our_logits(ours), expected, atol=near)
    assert np.abs(expected - without).max() > 0.1
    assert any(".experts.3.up_proj.lora_A" in name for name in named_adapter_weights(ours))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_adapters_that_we_write_load_in_peft(settings, tmp_path):
    base = moe_model()
    ours = ours_from(base, tmp_path)
    add_adapters(ours, settings, seed=1)
    stir(ours)
    save_adapters(ours, tmp_path / "adapters", str(tmp_path))
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    np.testing.assert_allclose(their_logits(theirs), our_logits(ours), atol=1e-4)
    adapted = {name.rpartition(".lora_A")[0] for name, _ in theirs.named_parameters() if ".lora_A." in name}
    assert adapted == {f"base_model.model.{name.rpartition('.')[0]}" for name in named_adapter_weights(ours)}


def test_gradients_agree_with_peft(tmp_path):
    """Experts that no token reached have none in either."""
    base = moe_model()
    ours = ours_from(base, tmp_path)
    theirs = peft_model(base)
    theirs.save_pretrained(tmp_path / "adapters")
    load_adapters(ours, tmp_path / "adapters")
    logits = theirs(input_ids=torch.tensor(IDS[None, :5])).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS[:5]), reduction="sum").backward()
    token_loss(ours, our_hidden(ours, IDS[:5], [5]), paddle.to_tensor(LABELS[None, :5])).loss_sum.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    own = {name: parameter.grad for name, parameter in named_adapter_weights(ours).items()}
    assert own.keys() == expected.keys()
    unreached = 0
    for name, gradient in own.items():
        wanted = expected[name]
        if gradient is None:
            assert wanted is None or not wanted.any(), name
            unreached += 1
        else:
            wanted = wanted.numpy().T
            assert np.abs(gradient.numpy() - wanted).max() <= 1e-3 * np.abs(wanted).max(), name
    assert 0 < unreached < len(own) / 2


def test_adapters_of_a_model_with_predictions_load_in_peft_without_those(tmp_path):
    """transformers has no such layers; adapters on them are the only thing that it leaves out."""
    ours = build_with_predictions(random_model("ernie4_5_moe", **MOE, num_nextn_predict_layers=1), tmp_path / "theirs")
    save_model_folder(ours, tmp_path / "base")
    add_adapters(ours, LoraSettings(4, 8.0), seed=1)
    stir(ours)
    save_adapters(ours, tmp_path / "adapters", str(tmp_path / "base"))
    paths = {name.rpartition(".")[0] for name in named_adapter_weights(ours)}
    assert "model.mtp_linear_proj.0" in paths
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    np.testing.assert_allclose(their_logits(theirs), our_logits(ours), atol=1e-4)


def test_adapters_that_peft_writes_load_beside_predictions(tmp_path):
    """peft has seen none of those, for transformers leaves them out."""
    ours = build_with_predictions(random_model("ernie4_5_moe", **MOE, num_nextn_predict_layers=1), tmp_path / "theirs")
    save_model_folder(ours, tmp_path / "base")
    theirs = peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    theirs.save_pretrained(tmp_path / "adapters")
    assert load_adapters(ours, tmp_path / "adapters")
    np.testing.assert_allclose(our_logits(ours), their_logits(theirs), atol=1e-4)
    assert not any(".mtp_" in name for name in named_adapter_weights(ours))


def test_adapters_on_routers_are_named_as_what_cannot_be_had(tmp_path):
    from erniekit.errors import ModelFileError

    base = moe_model()
    ours = ours_from(base, tmp_path)
    peft_model(base, target_modules=[*ALL, "gate"]).save_pretrained(tmp_path / "adapters")
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.gate\.lora_A.*no such linear layer"):
        read_adapters(tmp_path / "adapters", ours.config)
