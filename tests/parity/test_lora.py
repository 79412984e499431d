"""Adapters against peft and paddlenlp: logits, gradients, files both ways, merging."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import paddle
import peft
import pytest
import torch

from erniekit.model.head import token_loss
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import (
    add_adapters,
    load_adapters,
    merge_adapters,
    named_adapter_weights,
    save_adapters,
)
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.weights import named_weights

from .test_decoder import VOCABULARY, our_hidden, ours_from, random_model

pytestmark = pytest.mark.parity

IDS = np.random.default_rng(3).integers(1, VOCABULARY, 40)
LABELS = np.random.default_rng(4).integers(1, VOCABULARY, 40)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEFT_KINDS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "rsLoRA and DoRA": {"use_dora": True, "use_rslora": True},
    "two targets": {"target_modules": ["q_proj", "down_proj"]},
    "one layer": {"layers_to_transform": [1]},
    "a regular expression": {"target_modules": r".*layers\.0\.mlp\.(up|down)_proj"},
    "without some": {"exclude_modules": ["model.layers.0.mlp.up_proj", "o_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 6}, "alpha_pattern": {"down_proj": 3}},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA and rsLoRA": {"init_lora_weights": "pissa", "use_rslora": True},
}
SETTINGS = {
    "LoRA": LoraSettings(4, 8.0),
    "rsLoRA": LoraSettings(3, 4.0, rslora=True),
    "DoRA": LoraSettings(4, 6.0, dora=True),
    "PiSSA": LoraSettings(4, 8.0, init="pissa"),
    "PiSSA and rsLoRA": LoraSettings(3, 4.0, rslora=True, init="pissa"),
    "PiSSA and DoRA": LoraSettings(4, 8.0, dora=True, init="pissa"),
    "two targets": LoraSettings(4, 8.0, target_modules=("v_proj", "model.layers.1.mlp.up_proj")),
    "patterns": LoraSettings(4, 8.0, rank_pattern={"k_proj": 2}, alpha_pattern={r"mlp\..*": 3.0}),
}


def stir_torch(model, seed=5):
    """Move the adapters away from their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def stir(decoder, seed=5):
    rng = np.random.default_rng(seed)
    for parameter in named_adapter_weights(decoder).values():
        parameter.set_value(parameter.numpy() + rng.standard_normal(parameter.shape).astype(np.float32) * 0.05)


def their_logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS[None])).logits[0].numpy()


def our_logits(decoder):
    decoder.eval()
    with paddle.no_grad():
        return decoder.head(our_hidden(decoder, IDS, [len(IDS)])).numpy()[0]


def peft_model(base, **options):
    values = {"r": 4, "lora_alpha": 6, "target_modules": ALL, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**values)).eval()
    stir_torch(model)
    return model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", PEFT_KINDS.values(), ids=PEFT_KINDS.keys())
def test_adapters_that_peft_writes_load_here(options, bias, tmp_path):
    base = random_model(use_bias=bias)
    ours = ours_from(base, tmp_path)
    theirs = peft_model(base, **options)
    theirs.save_pretrained(tmp_path / "adapters")
    expected = their_logits(theirs)
    assert load_adapters(ours, tmp_path / "adapters")
    # peft takes the singular values in float32, which alone moves these logits by 3e-4 (see the next test)
    near, close = (1e-3, 5e-5) if "init_lora_weights" in options else (1e-4, 1e-5)
    np.testing.assert_allclose(our_logits(ours), expected, atol=near)
    stored = read_adapters(tmp_path / "adapters", ours.config)
    streamed = {
        name: stored.merge(name, value.numpy()) for name, value in random_model(use_bias=bias).state_dict().items()
    }
    merge_adapters(ours)
    np.testing.assert_allclose(our_logits(ours), expected, atol=near)
    merged = theirs.merge_and_unload().state_dict()
    for name, weight in named_weights(ours).items():
        own = weight.numpy().T if ours.config.architecture.is_linear(name) else weight.numpy()
        np.testing.assert_allclose(own, merged[name].numpy(), atol=close, err_msg=name)
        np.testing.assert_allclose(streamed[name], merged[name].numpy(), atol=close, err_msg=name)


def test_pissa_as_peft_saves_it_is_what_float64_makes_of_it(tmp_path):
    base = random_model()
    ours = ours_from(base, tmp_path)
    peft_model(random_model(), init_lora_weights="pissa").save_pretrained(tmp_path / "adapters")
    load_adapters(ours, tmp_path / "adapters")
    exact = base.double()
    factors = read_adapters(tmp_path / "adapters", ours.config).factors
    with torch.no_grad():
        for path, each in factors.items():
            weight = exact.get_submodule(path).weight
            left, values, right = torch.linalg.svd(weight, full_matrices=False)
            principal = left[:, :4] @ torch.diag(values[:4]) @ right[:4]
            update = torch.tensor(each.A @ each.B, dtype=torch.float64).T * (6 / 4)
            weight.copy_(weight - principal + update)
    np.testing.assert_allclose(our_logits(ours), their_logits(exact), atol=1e-4)


def test_pissa_that_peft_has_converted_loads_here(tmp_path):
    base = random_model()
    ours = ours_from(base, tmp_path)
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=6, target_modules=ALL, init_lora_weights="pissa", task_type="CAUSAL_LM")
    ).eval()
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    stir_torch(theirs)
    theirs.save_pretrained(tmp_path / "adapters", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    load_adapters(ours, tmp_path / "adapters")
    np.testing.assert_allclose(our_logits(ours), their_logits(theirs), atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_adapters_that_we_write_load_in_peft(settings, tmp_path):
    base = random_model()
    ours = ours_from(base, tmp_path)
    add_adapters(ours, settings, seed=1)
    stir(ours)
    save_adapters(ours, tmp_path / "adapters", str(tmp_path / "theirs"))
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapters")
    assert config.base_model_name_or_path == str(tmp_path / "theirs")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    expected = our_logits(ours)
    np.testing.assert_allclose(their_logits(theirs), expected, atol=1e-4)
    adapted = {name.rpartition(".lora_A")[0] for name, _ in theirs.named_parameters() if ".lora_A." in name}
    paths = {name.rpartition(".")[0] for name in named_adapter_weights(ours)}
    assert adapted == {f"base_model.model.{path}" for path in paths}


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "use_rslora": True}], ids=["LoRA", "DoRA"])
def test_gradients_agree_with_peft(options, tmp_path):
    base = random_model(use_bias=True)
    ours = ours_from(base, tmp_path)
    theirs = peft_model(base, **options)
    theirs.save_pretrained(tmp_path / "adapters")
    load_adapters(ours, tmp_path / "adapters")
    logits = theirs(input_ids=torch.tensor(IDS[None])).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS), reduction="sum").backward()
    token_loss(ours, our_hidden(ours, IDS, [len(IDS)]), paddle.to_tensor(LABELS[None])).loss_sum.backward()
    expected = {
        name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    own = {name: parameter.grad.numpy() for name, parameter in named_adapter_weights(ours).items()}
    assert own.keys() == expected.keys()
    for name, gradient in own.items():
        wanted = expected[name].T
        assert np.abs(gradient - wanted).max() <= 1e-3 * np.abs(wanted).max(), name


PADDLENLP = """
import json, sys
import numpy as np, paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from safetensors.numpy import save_file
folder, family, rslora = sys.argv[1], sys.argv[2], sys.argv[3] == "rslora"
shape = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, use_cache=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[family]
paddle.seed(0)
model = model_class(config_class(**shape))
for name, value in model.state_dict().items():
    value.set_value(paddle.randn(value.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
base = {}
for name, value in model.state_dict().items():
    hf = name.replace(family + ".", "model.", 1)
    array = value.numpy()
    base[hf] = np.ascontiguousarray(array.T if array.ndim == 2 and "embed" not in name else array)
save_file(base, folder + "/base/model.safetensors", metadata={"format": "pt"})
config = {"model_type": family, "hidden_act": "silu", "rms_norm_eps": model.config.rms_norm_eps,
          "rope_theta": getattr(model.config, "rope_theta", 10000.0), **shape}
json.dump(config, open(folder + "/base/config.json", "w"))
targets = [".*q_proj.*", ".*k_proj.*", ".*v_proj.*", ".*o_proj.*", ".*gate_proj.*", ".*up_proj.*", ".*down_proj.*"]
lora = LoRAModel(model, LoRAConfig(target_modules=targets, r=4, lora_alpha=6, rslora=rslora))
lora.mark_only_lora_as_trainable()
for name, value in lora.model.state_dict().items():
    if "lora_" in name:
        value.set_value(value + paddle.randn(value.shape) * 0.05)
lora.eval()
lora.save_pretrained(folder + "/pickled")
lora.lora_config.save_pretrained(folder + "/adapters")
state = {name: value.numpy() for name, value in lora.get_trainable_state_dict().items()}
save_file(state, folder + "/adapters/peft_model-00001-of-00001.safetensors", metadata={"format": "np"})
index = {"metadata": {}, "weight_map": dict.fromkeys(state, "peft_model-00001-of-00001.safetensors")}
json.dump(index, open(folder + "/adapters/peft_model.safetensors.index.json", "w"))
ids = np.load(folder + "/ids.npy")
with paddle.no_grad():
    logits = lora(paddle.to_tensor(ids[None]))
np.save(folder + "/logits.npy", (logits[0] if isinstance(logits, tuple) else logits).numpy()[0])
"""


@pytest.mark.parametrize(("family", "kind"), [("llama", "lora"), ("qwen2", "rslora")])
def test_adapters_that_paddlenlp_writes_load_here(family, kind, tmp_path):
    from erniekit.errors import ModelFileError
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model

    if importlib.util.find_spec("paddlenlp") is None:  # importing it takes seconds
        pytest.skip("paddlenlp is not installed")
    for name in ("base", "adapters"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "ids.npy", IDS)
    subprocess.run([sys.executable, "-c", PADDLENLP, str(tmp_path), family, kind], check=True, capture_output=True)
    ours = build_model(ModelConfig.from_folder(tmp_path / "base"), tmp_path / "base", adapters=tmp_path / "adapters")
    np.testing.assert_allclose(our_logits(ours), np.load(tmp_path / "logits.npy"), atol=1e-4)

    with pytest.raises(ModelFileError, match="pickled") as refused:
        read_adapters(tmp_path / "pickled", ours.config)
    command = str(refused.value).splitlines()[-1].strip()
    environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, capture_output=True, env=environment)
    converted = read_adapters(tmp_path / "pickled", ours.config)
    assert json.loads((tmp_path / "pickled/lora_config.json").read_text())["r"] == converted.settings.rank
    for path, factors in read_adapters(tmp_path / "adapters", ours.config).factors.items():
        np.testing.assert_array_equal(converted.factors[path].A, factors.A)
        np.testing.assert_array_equal(converted.factors[path].B, factors.B)
