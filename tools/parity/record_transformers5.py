#!/usr/bin/env python3
"""Record what transformers 5 computes, for the plain test run; or open a folder with it, for the parity tests.

    make oracle-5                                                  an environment of its own, and every family anew
    .venv-transformers5/bin/python tools/parity/record_transformers5.py [FAMILY ...]
    .venv-transformers5/bin/python tools/parity/record_transformers5.py --open FOLDER... --output FILE

Needs transformers 5, torch and safetensors, and neither Paddle nor the package; the parity extra has transformers 4,
which cannot be installed beside it. To add a case, add a line to CASES and record its family.

A file tests/model/transformers5/FAMILY.npz holds for each case `config.json` as transformers 5 saves it, the names and
shapes of the weights in the folder, ids and labels, and what it computes in float32: logits [tokens, vocabulary], the
loss summed over the labels, and the norm of the loss's gradient for each weight in the folder. The weights themselves
are those of tests/model/seeded_weights.py, and are not stored; nor are the log-mel features that an audio encoder
gets, of which the file has the frames of each window. The encoder's states stand at the tokens AUDIO_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.model.seeded_weights import seeded_ids, seeded_weight  # noqa: E402

TARGET = ROOT / "tests/model/transformers5"
TOKENS, SEED = 72, 5  # more tokens than the original lengths of the scalings
TINY = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}  # not the ratio of the lengths
AUDIO_TOKEN = TINY["vocab_size"] - 1
VOXTRAL_ENCODER = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 5,
    "max_source_positions": 12,
}
QWEN2_AUDIO_ENCODER = {
    "d_model": 8,
    "encoder_ffn_dim": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "num_mel_bins": 5,
    "max_source_positions": 13,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
ERNIE_EXPERTS = {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 6}
MIXTRAL = {"num_local_experts": 3, "num_experts_per_tok": 2}

# Every case: the family, its name, and what differs from TINY.
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "llama3 scaling, biases", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "attention_bias": True}),
    ("llama", "yarn, one key head", {"rope_parameters": {**YARN, "rope_theta": 1e4}, "num_key_value_heads": 1}),
    (
        "llama",
        "yarn with weights of its magnitude",
        {
            "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
            "head_dim": 16,
        },
    ),
    (
        "llama",
        "yarn without original length",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 9}},
    ),
    (
        "llama",
        "linear scaling, tied",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "tie_word_embeddings": True},
    ),
    ("llama", "biases, own head size", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("mistral", "window", {"sliding_window": 16, "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}}),
    ("mistral", "no window, tied", {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 6}),
    ("qwen2", "yarn, grouped queries", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ("qwen2", "other theta, tied", {"rope_parameters": {"rope_theta": 1e6}, "tie_word_embeddings": True}),
    ("qwen3", "biases, tied", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    ("qwen3", "own head size, yarn", {"head_dim": 6, "rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ("qwen3_moe", "normalised, a dense layer", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    (
        "mixtral",
        "window, other theta",
        {**MIXTRAL, "head_dim": 6, "sliding_window": 16, "rope_parameters": {"rope_theta": 2e4}},
    ),
    (
        "qwen2_moe",
        "gated shared expert, a dense layer",
        {**EXPERTS, "shared_expert_intermediate_size": 10, "mlp_only_layers": [0]},
    ),
    (
        "granite",
        "all multipliers",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    ("smollm3", "a layer without positions, untied", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    ("olmo2", "biases, other theta", {"attention_bias": True, "rope_parameters": {"rope_theta": 5e5}}),
    ("glm4", "half of each head turned", {"head_dim": 8}),
    (
        "glm4",
        "a quarter, other theta, no biases",
        {
            "head_dim": 8,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
        },
    ),
    (
        "gemma3_text",
        "layers of both types",
        {
            "head_dim": 6,
            "sliding_window": 16,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
            },
        },
    ),
    (
        "gpt_oss",
        "sinks, layers of both types, yarn",
        {
            **MIXTRAL,
            "head_dim": 6,
            "sliding_window": 16,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False},
        },
    ),
    (
        "deepseek_v3",
        "groups of experts, yarn",
        {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 6,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    (
        "ernie4_5",
        "own head size, biases, other theta",
        {"head_dim": 6, "use_bias": True, "rope_parameters": {"rope_theta": 300.0}},
    ),
    (
        "ernie4_5",
        "linear scaling, untied",
        {"head_dim": 4, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ),
    ("ernie4_5_moe", "shared experts", {**ERNIE_EXPERTS, "moe_num_shared_experts": 2}),
    (
        "ernie4_5_moe",
        "no shared experts, another theta",
        {**ERNIE_EXPERTS, "moe_num_shared_experts": 0, "rope_parameters": {"rope_theta": 1e4}},
    ),
    (
        "ernie4_5_moe",
        "every other layer up to the third",
        {**ERNIE_EXPERTS, "num_hidden_layers": 4, "moe_layer_end_index": 2, "moe_layer_start_index": 0}
        | {"moe_layer_interval": 2, "moe_norm_min": 0.6, "tie_word_embeddings": False},
    ),
    (
        "voxtral",
        "a recording of two windows and one of one",
        {
            "text_config": {**TINY, "head_dim": 6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            "audio_config": VOXTRAL_ENCODER,
            "audio_token_id": AUDIO_TOKEN,
        },
    ),
    (
        "qwen2_audio",
        "recordings of different lengths",
        {"text_config": TINY, "audio_config": QWEN2_AUDIO_ENCODER, "audio_token_index": AUDIO_TOKEN},
    ),
)
# Of families with an audio encoder: the first token of each run of states, its length, and the frames of its windows.
AUDIO_RUNS: dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    "voxtral": ((2, 6, (24, 11)), (12, 3, (24,))),
    "qwen2_audio": ((2, 8, (26, 9)), (11, 1, (3,)), (13, 5, (22,))),
}


def record(family: str, name: str, shape: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of one case, by their names in the file."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        if family in AUDIO_RUNS:
            made = class_of(family)(CONFIG_MAPPING[family](**shape))
        else:
            made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**TINY, **shape}))
        made.save_pretrained(folder)
        config = (folder / "config.json").read_bytes()
        shapes = {weight: values.shape for weight, values in load_file(folder / "model.safetensors").items()}
        weights = {weight: seeded_weight(weight, shape, SEED) for weight, shape in sorted(shapes.items())}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model = opened(folder)
        runs = AUDIO_RUNS.get(family, ())
        ids = seeded_ids(f"{name} ids", TOKENS, TINY["vocab_size"] - bool(runs), SEED)
        for start, length, _ in runs:
            ids[start : start + length] = AUDIO_TOKEN
        frames = np.array([count for _, _, windows in runs for count in windows], np.int32)
        inputs = audio_inputs(model.config, seeded_features(model.config, name, len(frames)), frames) if runs else {}
        labels = seeded_ids(f"{name} labels", TOKENS, TINY["vocab_size"], SEED)
        labels[seeded_ids(f"{name} masked", TOKENS, 10, SEED) < 3] = -100
        logits = model(input_ids=torch.tensor(ids[None]), **inputs).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum")
        loss.backward()
        with torch.no_grad():  # saved in place of the weights, gradients get the names that weights have in files
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            for buffer in model.buffers():  # saved with the weights; no gradient reaches them
                buffer.zero_()
        model.save_pretrained(Path(place) / "gradients")
        gradients = load_file(Path(place) / "gradients/model.safetensors")
    names = sorted(shapes)
    facts = {
        "name": name,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "seed": SEED,
        "shapes": {weight: shapes[weight] for weight in names},
    }
    return {
        "config": np.frombuffer(config, np.uint8),
        "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
        "ids": ids.astype(np.int16),
        "labels": labels.astype(np.int16),
        **({"frames": frames} if runs else {}),
        "logits": logits.detach().numpy(),
        "loss": np.float32(loss.item()),
        "gradient_norms": np.array([np.linalg.norm(gradients[weight].astype(np.float64)) for weight in names]),
    }


def class_of(family: str) -> Any:
    """Return the class of a family that no AutoModelForCausalLM opens."""
    return {
        "voxtral": transformers.VoxtralForConditionalGeneration,
        "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
    }[family]


def seeded_features(config: Any, name: str, windows: int) -> np.ndarray:
    """Return the log-mel features of so many windows, float32 [windows, mel bins, frames]."""
    audio = config.audio_config
    return seeded_weight(f"{name} features", (windows, audio.num_mel_bins, 2 * audio.max_source_positions), SEED)


def audio_inputs(config: Any, features: np.ndarray, frames: np.ndarray) -> dict[str, torch.Tensor]:
    """Return what a model takes beside ids: the features, and for Qwen2-Audio which frames are sound."""
    inputs = {"input_features": torch.tensor(features)}
    if config.model_type == "qwen2_audio":
        is_sound = np.arange(features.shape[-1])[None] < frames[:, None]
        inputs["feature_attention_mask"] = torch.tensor(is_sound.astype(np.int64))
    return inputs


def opened(folder: Path) -> torch.nn.Module:
    """Open a folder as a user does, with the type that `config.json` names; nothing may be missing or left over."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    if family in AUDIO_RUNS:
        model, info = class_of(family).from_pretrained(folder, dtype="auto", output_loading_info=True)
        for name, module in model.named_modules():
            if name.endswith("embed_positions"):
                module.requires_grad_(False)  # as its class says; from_pretrained of 5.23 loses it
    else:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            experts_implementation="eager",  # the others want sizes that are multiples of 16 bytes
        )
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise SystemExit(f"{folder}: {wrong}")
    return model.eval()


def open_folders(folders: list[Path], output: Path) -> None:
    """Write the logits of each folder for the ids in its `ids.json`, and the features and frames in its `audio.npz` if
    it has one, and the type of its weights."""
    results: dict[str, Any] = {}
    for folder in folders:
        model = opened(folder)
        with torch.no_grad():
            audio = np.load(folder / "audio.npz") if (folder / "audio.npz").exists() else None
            inputs = {} if audio is None else audio_inputs(model.config, audio["features"], audio["frames"])
            ids = torch.tensor([json.loads((folder / "ids.json").read_text())])
            logits = model(input_ids=ids, **inputs).logits[0]
        results[f"{folder.name}/logits"] = logits.float().numpy()
        results[f"{folder.name}/dtype"] = np.array(str(model.dtype))
    np.savez(output, **results)


def main() -> None:
    families = list(dict.fromkeys(family for family, _, _ in CASES))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="record these only")
    parser.add_argument("--open", nargs="+", type=Path, metavar="FOLDER", help="compute logits of these folders")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write these logits (.npz)")
    options = parser.parse_args()
    if int(transformers.__version__.split(".")[0]) < 5:
        parser.error(f"this is transformers {transformers.__version__}; `make oracle-5` makes an environment with 5")
    if options.open:
        open_folders(options.open, options.output)
        return
    transformers.utils.logging.disable_progress_bar()
    TARGET.mkdir(exist_ok=True)
    for family in options.families or families:
        cases = [record(*case) for case in CASES if case[0] == family]
        path = TARGET / f"{family}.npz"
        np.savez_compressed(
            path, **{f"{i}/{key}": value for i, case in enumerate(cases) for key, value in case.items()}
        )
        print(f"{path.relative_to(ROOT)}: {len(cases)} cases, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
