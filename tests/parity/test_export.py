"""Exported folders against transformers, peft and torch's own rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file

from erniekit.config import Config
from erniekit.export.export import export_model
from erniekit.model.storage.precision import round_to_bfloat16

from .families import CASES, random_model

pytestmark = pytest.mark.parity
TOKENIZER = Path(__file__).parents[2] / "examples/models/tiny-ernie"
VOCABULARY = 512
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def export(named, target, *overrides, **options):
    export_model(named, target, Config.load(None, overrides, verb="export"), **options)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(arrays.arrays(np.uint32, st.integers(1, 40)))
def test_rounding_is_torchs(bits):
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    found = torch.from_numpy(round_to_bfloat16(values).view(np.int16).copy()).view(torch.bfloat16)
    both_nan = torch.isnan(expected) & torch.isnan(found)
    assert torch.equal(expected.view(torch.int16)[~both_nan], found.view(torch.int16)[~both_nan])
    assert torch.equal(torch.isnan(expected), torch.isnan(found))


@pytest.mark.parametrize(("family", "shape"), CASES.values(), ids=CASES.keys())
def test_what_we_merge_is_what_peft_merges(family, shape, tmp_path):
    theirs = random_model(family, **{**shape, "vocab_size": VOCABULARY})
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=torch.float32)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=LINEARS, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapters")
    ids = torch.tensor(np.random.default_rng(0).integers(0, VOCABULARY, (1, 40)))
    with torch.no_grad():
        expected = adapted(input_ids=ids).logits.numpy()

    export(tmp_path / "adapters", tmp_path / "float32", "max_shard_size=2e-5", dtype="float32")
    export(tmp_path / "adapters", tmp_path / "as the base")
    merged, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float32", torch_dtype="auto", output_loading_info=True
    )
    assert not any(info.values()) and merged.dtype == torch.float32
    with torch.no_grad():
        found = merged.eval()(input_ids=ids).logits.numpy()
    assert np.std(expected) > 1.0
    np.testing.assert_allclose(found, expected, atol=2e-4)

    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "as the base", torch_dtype="auto")
    assert rounded.dtype == torch.bfloat16
    whole = {
        name: tensor
        for file in (tmp_path / "float32").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    stored = load_file(tmp_path / "as the base/model.safetensors")
    assert whole.keys() == stored.keys()
    for name, tensor in whole.items():
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name
