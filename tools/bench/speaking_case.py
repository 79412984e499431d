"""The models, texts and settings that every side of the speaking benchmark works on. Standard library only."""

from __future__ import annotations

from typing import Any, NamedTuple

LEVELS, CODES, FRAME_RATE = 8, 1024, 25  # of OmniVoice's codec
STEPS, CHUNK_SECONDS, LONG_SECONDS, AR_SECONDS = 16, 5.0, 15.0, 4.0
SETTINGS = {  # by the package's names; the likeliest codes, so that both sides write the same
    "num_step": STEPS, "guidance_scale": 2.0, "t_shift": 0.1, "layer_penalty_factor": 5.0,
    "position_temperature": 0.0, "class_temperature": 0.0, "audio_chunk_duration": CHUNK_SECONDS,
    "audio_chunk_threshold": LONG_SECONDS,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # the decoders
    "tiny": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 32},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 64},
}  # fmt: skip
SHARED = {
    "vocab_size": 2048,  # more than the tokenizer's: the package looks codes up among the words, too
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "initializer_range": 0.06, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    "torch_dtype": "float32",
}  # fmt: skip
SENTENCES = (
    "Three five nine, said the voice on the other side.",
    "Nobody had called that number before.",
    "One two three four five six seven, and then there was silence again.",
    "She wrote all of it down; it was late.",
    "Eight nights later the same voice called again, and it said zero.",
    "He asked for her name.",
    "Six and nine are not the same, whoever turns them around.",
    "Nothing else was heard of it until the ninth of May.",
)


class Task(NamedTuple):
    """What a side is asked to speak: texts that come side by side."""

    words: str
    texts: tuple[str, ...]


TASKS = {
    "one": Task("a sentence", SENTENCES[:1]),
    "batch": Task(f"{len(SENTENCES)} sentences at once", SENTENCES),
    "long": Task(f"a text in pieces of {CHUNK_SECONDS:g} s", (" ".join(SENTENCES),)),
}


def llm_config(model: str, kind: str) -> dict[str, Any]:
    """The decoder's part of config.json."""
    return {**SHARED, **MODELS[model], "model_type": kind}
