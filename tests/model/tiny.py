"""Tiny models for tests: large enough weights, and uneven enough norms, for errors to show."""

from __future__ import annotations

import numpy as np
import paddle

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights

CONFIG = {
    "model_type": "ernie4_5",
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# A dense layer, then one of experts.
EXPERTS = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 12,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}
# What some families need for a tiny shape.
FAMILIES = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 9},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24},
}


# Of families with an encoder, the keys around those of the decoder.
AROUND = {
    "voxtral": {
        "audio_token_id": 0,
        "audio_config": {
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_mel_bins": 5,
            "max_source_positions": 12,
        },
    },
    "qwen2_audio": {
        "audio_token_index": 0,
        "audio_config": {
            "d_model": 24,
            "encoder_ffn_dim": 36,
            "encoder_layers": 2,
            "encoder_attention_heads": 12,
            "num_mel_bins": 5,
            "max_source_positions": 13,
        },
    },
}


def config_file(values):
    """The keys of a `config.json`; those of a family with an encoder stand in `text_config`."""
    around = AROUND.get(values.get("model_type"))
    if around is None:
        return values
    text = {key: value for key, value in values.items() if key != "model_type"}
    return {"model_type": values["model_type"], "text_config": text, **around}


def tiny_config(**changes):
    return ModelConfig.from_json(config_file({**CONFIG, **FAMILIES.get(changes.get("model_type"), {}), **changes}))


def tiny_model(seed=0, hidden_dropout=0.0, attention_dropout=0.0, **changes):
    decoder = build_model(
        tiny_config(**changes), None, seed=seed, hidden_dropout=hidden_dropout, attention_dropout=attention_dropout
    )
    rng = np.random.default_rng(seed)
    for name, parameter in named_weights(decoder).items():
        values = rng.standard_normal(parameter.shape) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        parameter.set_value(values.astype(np.float32))
    return decoder


def pack(ids, ends):
    """input_ids [1, S], position_ids [1, S] and the plan of one row of documents that end at `ends`."""
    ids = np.asarray(ids)
    lengths = np.diff([0, *ends])
    positions = np.concatenate([np.arange(length) for length in lengths])
    indices = np.repeat(ends, lengths).astype(np.int32).reshape(1, 1, -1, 1)
    return paddle.to_tensor(ids[None]), paddle.to_tensor(positions[None]), AttentionPlan.build(indices)


def audio_arrays(config, ids, features, frames):
    """What an audio family reads beside ids [S], of windows of so many frames whose tokens stand in order."""
    audio = config.architecture.audio(config)
    states = np.full(len(ids), -1)
    of_windows = [
        np.arange(audio.tokens_of(int(count))) + window * audio.window_tokens for window, count in enumerate(frames)
    ]
    states[np.asarray(ids) == audio.placeholder_id] = np.concatenate([*of_windows, np.zeros(0, np.int64)])
    arrays = {"audio_features": features, "audio_frames": np.asarray(frames, np.int32), "audio_states": states[None]}
    return {name: paddle.to_tensor(values) for name, values in arrays.items()}


def logits_of(decoder, ids, ends=None):
    """Logits [S, V] of one row."""
    return decoder.head(decoder(*pack(ids, ends or [len(ids)]))).numpy()[0]
