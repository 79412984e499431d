"""A tiny model that listens, with random weights: Qwen2-Audio's shape with the tokenizer of the quickstart's model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import soundfile

from tests.tiny_runs import save_random_model

TINY_ERNIE = Path(__file__).parents[2] / "examples/models/tiny-ernie"
PLACEHOLDER = "<mask:0>"
WINDOW_SECONDS = 0.4
TEMPLATE = """\
{%- for message in messages %}{{ '<|begin_of_sentence|>' + message['role'] + ': ' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{%- for part in message['content'] %}
{{- '<mask:0>' if part['type'] == 'audio' else part['text'] }}{%- endfor %}{%- endif %}{{ '<|end_of_sentence|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|begin_of_sentence|>assistant: ' }}{%- endif %}"""
CONFIG = {
    "model_type": "qwen2_audio",
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_token_index": 5,
    "audio_config": {
        "model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "encoder_layers": 1, "max_source_positions": 20, "num_mel_bins": 8,
    },
    "text_config": {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "vocab_size": 512, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
    },
}  # fmt: skip


def listener_folder(folder: Path, seed: int = 3) -> Path:
    """Write a model folder, whose windows are 0.4 s."""
    source = folder / "shape"
    source.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_ERNIE / name, source)
    (source / "config.json").write_text(json.dumps(CONFIG))
    model = folder / "model"
    model.mkdir()
    save_random_model(source, model, seed=seed)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def write_sound(path: Path, seconds: float, seed: int = 0, rate: int = 16_000) -> Path:
    """Write noise with a pitch that changes."""
    draw = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    sound = np.sin(2 * np.pi * (200 + 900 * draw.random() + 300 * times) * times) + draw.normal(0, 0.2, len(times))
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.3 * sound, rate)
    return path
