"""Model folders: config.json, tokenizers, features, safetensors, adapters with places changed; verbs agree."""

from __future__ import annotations

import json
import struct
from base64 import b64encode
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from case import Case
from values import as_json, changed, damaged

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "models" / "tiny-ernie"
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
Header = dict[str, Any]


@cache
def config() -> dict[str, Any]:
    """Return a config.json of a model that is small enough to be written for each case."""
    return {**json.loads((TINY / "config.json").read_text(encoding="utf-8")), **SHAPE}


@cache
def listening_files() -> dict[str, bytes]:
    """Return the files of a model that listens, but for its weights: Tekken's tokenizer, and settings of features."""
    vocabulary = [bytes([number]) for number in range(256)] + [b"in", b"er", b"the"]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[BEGIN_AUDIO]"]
    special = [*names, "[AUDIO]", "[TRANSCRIBE]", "<pad>"]
    size = len(vocabulary) + len(special)
    encoder = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder |= {"num_mel_bins": 8, "max_source_positions": 8}
    model = {"model_type": "voxtral", "audio_token_id": special.index("[AUDIO]"), "audio_config": encoder}
    tekken = {
        "config": {
            "pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "version": "v7", "default_vocab_size": size,
            "default_num_special_tokens": len(special), "num_vocab_tokens": len(vocabulary),
        },
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(vocabulary)
        ],
        "special_tokens": [{"rank": rank, "token_str": text} for rank, text in enumerate(special)],
    }  # fmt: skip
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "hop_length": 160, "n_fft": 400}
    return {
        "config.json": as_json({**model, "text_config": {**SHAPE, "vocab_size": size, "max_position_embeddings": 64}}),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tekken.json": as_json(tekken),
        "preprocessor_config.json": as_json(features),
        "processor_config.json": as_json({"feature_extractor": features}),
    }


def text_files() -> dict[str, bytes]:
    """Return the files of ERNIE's tiny model with its smaller shape, but for its weights."""
    files = {"config.json": as_json(config()), "generation_config.json": b'{"eos_token_id": 2}'}
    for path in sorted(TINY.iterdir()):
        if path.suffix in (".json", ".model", ".jinja") and path.name not in files:
            files[path.name] = path.read_bytes()
    return files


@cache
def weights(config_file: bytes) -> tuple[Header, bytes]:
    """Return the header and the data of the safetensors file of a model."""
    from erniekit.model.architectures.model_config import ModelConfig

    generator = np.random.default_rng(0)
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in ModelConfig.from_json(json.loads(config_file)).weight_shapes().items():
        values = (generator.normal(size=shape) * 0.02).astype(np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return header, data


def safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def draw(random: Random) -> Case:
    """Draw a folder with one file of it damaged or changed."""
    files = dict(listening_files() if random.random() < 0.3 else text_files())
    header, data = weights(files["config.json"])
    files["model.safetensors"] = safetensors(as_json(header), data)
    victim = random.choice([*files, "model.safetensors", "config.json", "adapter"])
    commands = [
        ["validate", "{folder}/run.yaml", "--verb", "generate", "model_name_or_path={folder}/model"],
        ["generate", "{folder}/model", "--prompt", "Hi", "--max-new-tokens", "1"],
    ]
    if victim == "adapter":
        adapter = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "base_model_name_or_path": "x",
        }
        files["adapter/adapter_config.json"] = as_json(changed(adapter, random))
        files["adapter/adapter_model.safetensors"] = safetensors(b"{}", b"")
        commands[0] += ["lora_path={folder}/model/adapter"]
        commands[1] += ["--lora-path", "{folder}/model/adapter"]
    elif victim == "model.safetensors" and random.random() < 0.7:
        files[victim] = safetensors(as_json(changed(header, random)), data + b"x" * random.choice([0, 0, 4]))
    elif files[victim][:1] == b"{" and random.random() < 0.8:
        files[victim] = as_json(changed(json.loads(files[victim]), random))
    else:
        files[victim] = damaged(files[victim], random)
    own = {f"model/{name}": content for name, content in files.items()}
    return Case({"run.yaml": b"max_new_tokens: 1\n", **own}, commands, agree=True)
