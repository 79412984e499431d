"""Tiny models that write codes: `omnivoice` around a Qwen3 and `vall_e` around a Llama, of four levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights

LEVELS, CODES = 4, 16
LLM = {
    "vocab_size": 56, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 256, "initializer_range": 0.3,
    "tie_word_embeddings": True,
}  # fmt: skip
OMNIVOICE = {
    "model_type": "omnivoice",
    "audio_vocab_size": CODES + 1,
    "audio_mask_id": CODES,
    "num_audio_codebook": LEVELS,
    "audio_codebook_weights": [8, 6, 4, 2],
    "llm_config": {"model_type": "qwen3", **LLM},
}
VALL_E = {
    "model_type": "vall_e",
    "audio_vocab_size": CODES,
    "num_audio_codebook": LEVELS,
    "llm_config": {"model_type": "llama", "hidden_act": "gelu", **LLM, "tie_word_embeddings": False},
}


def omnivoice_values(**changes: Any) -> dict[str, Any]:
    """The keys of config.json; those of `llm` change the decoder's."""
    return _changed(OMNIVOICE, changes)


def vall_e_values(**changes: Any) -> dict[str, Any]:
    """The keys of config.json; those of `llm` change the decoder's."""
    return _changed(VALL_E, changes)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    llm = {**values["llm_config"], **changes.pop("llm", {})}
    return {**values, **changes, "llm_config": llm}


def omnivoice_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_json(omnivoice_values(**changes))


def vall_e_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_json(vall_e_values(**changes))


def speaking_model(config: ModelConfig, seed: int = 0, **arguments: Any) -> Any:
    """A model with weights large and uneven enough for errors to show."""
    decoder = build_model(config, None, seed=seed, **arguments)
    rng = np.random.default_rng(seed)
    for name, parameter in named_weights(decoder).items():
        values = rng.standard_normal(parameter.shape) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        parameter.set_value(values.astype(np.float32))
    return decoder


def drawn_row(config: ModelConfig, lengths: tuple[int, ...] = (14, 11), seed: int = 1) -> dict[str, np.ndarray]:
    """One row of documents, the first 4 positions of each text: ids [1, S], positions, columns of documents that are
    read both ways, codes [1, S, L], those of whole levels but for a prompt and a written one (`vall_e`), and labels."""
    rng, layout = np.random.default_rng(seed), code_layout(config)
    total, ends = sum(lengths), np.cumsum(lengths)
    ids = rng.integers(1, config.vocab_size, (1, total))
    codes = np.full((1, total, layout.levels), -1)
    labels = np.full((1, total, layout.levels), -100)
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    starts = np.repeat(ends - lengths, lengths)
    is_code = (np.arange(total) - starts) >= 4
    for level, first in enumerate(layout.whole):
        codes[0, is_code, level] = first + rng.integers(0, layout.codebook_size, is_code.sum())
    for at in np.flatnonzero(np.diff(is_code.astype(int), prepend=0) == 1) if layout.written is not None else ():
        codes[0, at] = np.array(layout.prompts) + codes[0, at, 0] % 7
        codes[0, at + 1] = [layout.written + 3] + [-1] * (layout.levels - 1)
    for level in range(layout.levels):
        chosen = is_code & (rng.random(total) < 0.6)
        labels[0, chosen, level] = rng.integers(0, layout.codebook_size, chosen.sum())
    columns = np.stack([np.repeat(ends, lengths), starts], -1).astype(np.int32)[None, None]
    return {"input_ids": ids, "position_ids": positions, "columns": columns, "codes": codes, "labels": labels}


def hidden_of(decoder: Any, row: dict[str, np.ndarray]) -> paddle.Tensor:
    """Hidden states [1, S, H] after the final norm; no tensor parallelism."""
    plan = AttentionPlan.build(row["columns"], causal=row["columns"].shape[-1] == 1)
    inputs = {name: paddle.to_tensor(row[name]) for name in ("input_ids", "codes")}
    context = decoder.context(paddle.to_tensor(row["position_ids"]), plan)
    return decoder.norm(decoder.forward_layers(decoder.embed(inputs), context))
