"""The models and the documents of the speed benchmarks. NumPy only, because every side of a comparison reads them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

NO_LABEL = -100
PROMPT_SHARE = 0.25  # of a document; its tokens carry no label
MEDIAN, SIGMA = 300, 0.9  # of the log-normal lengths of documents; their mean is 450
SHORTEST = 16

DENSE = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "vocab_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": DENSE | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64},
    "small": DENSE | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128},
    "medium": DENSE
    | {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32768,
    },
    "moe": DENSE
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "head_dim": 96,
        "moe_num_experts": 16,
        "moe_k": 4,
        "moe_intermediate_size": 256,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 5,
        "moe_layer_interval": 1,
        "router_aux_loss_coef": 0.0,
    },
}
LORA_RANK = 8
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pack(length: int, step: int, vocabulary: int) -> list[np.ndarray]:
    """The documents of a step, token ids, `length` tokens together: the last one is cut off."""
    rng = np.random.default_rng([length, step])
    lengths: list[int] = []
    while (room := length - sum(lengths)) > 0:
        drawn = int(np.clip(rng.lognormal(np.log(MEDIAN), SIGMA), SHORTEST, length))
        lengths.append(room if room - drawn < SHORTEST else drawn)
    return [rng.integers(3, vocabulary, size) for size in lengths]


def labels_of(document: np.ndarray) -> np.ndarray:
    """What each token is asked to be, not shifted: the prompt is not asked."""
    labels = document.copy()
    labels[: int(len(document) * PROMPT_SHARE)] = NO_LABEL
    return labels


def pairs(length: int, step: int, vocabulary: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The pairs of a step: prompt, chosen, rejected. At least one, then as many as fit into `length` tokens."""
    rng = np.random.default_rng([length, step, 1])
    made: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    room = length
    while True:
        sizes = np.clip(rng.lognormal(np.log(MEDIAN / 2), SIGMA, 3), SHORTEST, length // 3).astype(int)
        if made and sizes.sum() > room:
            return made
        prompt, chosen, rejected = (rng.integers(3, vocabulary, size) for size in sizes)
        made.append((prompt, chosen, rejected))
        room -= int(sizes.sum())


def padded_batches(length: int, first_step: int, steps: int, vocabulary: int) -> list[list[np.ndarray]]:
    """The documents of several steps grouped by length instead of packed: each batch, padded, has at most `length`
    positions (one document may be longer); in a random order."""
    documents = sorted(
        (document for step in range(first_step, first_step + steps) for document in pack(length, step, vocabulary)),
        key=len,
    )
    batches: list[list[np.ndarray]] = [[]]
    for document in documents:
        if batches[-1] and len(document) * (len(batches[-1]) + 1) > length:
            batches.append([])
        batches[-1].append(document)
    order = np.random.default_rng([length, first_step]).permutation(len(batches))
    return [batches[i] for i in order]


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def arguments() -> argparse.Namespace:
    """What every side is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="the model")
    parser.add_argument("--stage", choices=("sft", "lora", "wint8", "dpo"), required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens a step")
    parser.add_argument("--batching", choices=("packed", "padded"), default="packed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()
