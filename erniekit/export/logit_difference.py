"""How far an exported model is from the trained one: the largest difference of their logits, both read from files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.environment import available_memory
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention import AttentionPlan
from erniekit.model.decoder import Decoder

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper and a storm.",
    "计算 12 加 30 等于多少？",
    "def fibonacci(n):",
)
MEMORY_FACTOR = 1.3  # what computing takes beside the weights, as a factor


@dataclass(frozen=True)
class LogitDifference:
    """Of two models on the same prompts. Logits are natural, before any temperature."""

    largest: float
    largest_logit: float
    positions: int
    same_argmax: int  # positions at which both have the same most likely token

    def __str__(self) -> str:
        return (
            f"largest difference {self.largest:.3g} (logits up to {self.largest_logit:.3g}), the same most likely "
            f"token at {self.same_argmax} of {self.positions} positions of {len(PROMPTS)} prompts"
        )


def compare(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> LogitDifference:
    """Two models' logits of the same prompts, each [tokens, V]."""
    pairs = list(zip(expected, found, strict=True))
    return LogitDifference(
        largest=max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs),
        largest_logit=max(float(np.abs(ours).max()) for ours, _ in pairs),
        positions=sum(len(ours) for ours, _ in pairs),
        same_argmax=sum(int((ours.argmax(-1) == theirs.argmax(-1)).sum()) for ours, theirs in pairs),
    )


def fits_in_memory(config: ModelConfig) -> bool:
    """Whether a model of this shape can be loaded as float32 now."""
    available = available_memory()
    return available is None or 4 * config.parameter_count() * MEMORY_FACTOR < available


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids behind the beginning-of-text token, where the model has one."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [*start, *tokenizer.encode(text)]


@paddle.no_grad()
def prompt_logits(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The logits after every token of each prompt, float32 [tokens, V]."""
    decoder.eval()
    logits = []
    for prompt in prompts:
        tokens = prompt[: decoder.config.max_position_embeddings]
        plan = AttentionPlan.build(np.full((1, 1, len(tokens), 1), len(tokens), np.int32))
        positions = paddle.arange(len(tokens)).unsqueeze(0)
        hidden = decoder(paddle.to_tensor([tokens]), positions, plan)
        logits.append(decoder.head(hidden).astype("float32").numpy()[0])
    return logits
