"""Measure how far an exported model is from the trained one: the largest difference of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.environment import available_memory
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.attention import AttentionPlan
from erniekit.model.code_layers import code_logits
from erniekit.model.decoder import Decoder

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper and a storm.",
    "计算 12 加 30 等于多少？",
    "def fibonacci(n):",
)
MEMORY_FACTOR = 1.3  # memory that a forward pass needs, relative to the weights


@dataclass(frozen=True)
class LogitDifference:
    """The difference of two models on the same prompts. Logits are unscaled (temperature 1)."""

    largest: float
    largest_logit: float
    positions: int
    same_argmax: int  # positions at which both have the same most likely token
    scores: bool = False  # whether they are scores of a reward model, one at each position

    def __str__(self) -> str:
        if self.scores:
            return (
                f"largest difference {self.largest:.3g} (scores up to {self.largest_logit:.3g}) at {self.positions} "
                f"positions of {len(PROMPTS)} prompts"
            )
        return (
            f"largest difference {self.largest:.3g} (logits up to {self.largest_logit:.3g}), the same most likely "
            f"token at {self.same_argmax} of {self.positions} positions of {len(PROMPTS)} prompts"
        )


def compare(expected: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> LogitDifference:
    """Compare two models' logits of the same prompts, each float32 [tokens, V]."""
    pairs = list(zip(expected, found, strict=True))
    return LogitDifference(
        largest=max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs),
        largest_logit=max(float(np.abs(ours).max()) for ours, _ in pairs),
        positions=sum(len(ours) for ours, _ in pairs),
        same_argmax=sum(int((ours.argmax(-1) == theirs.argmax(-1)).sum()) for ours, theirs in pairs),
        scores=pairs[0][0].shape[-1] == 1,
    )


def fits_in_memory(config: ModelConfig) -> bool:
    """Return whether a model of this shape fits into the available memory as float32."""
    available = available_memory()
    return available is None or 4 * config.parameter_count() * MEMORY_FACTOR < available


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, with the beginning-of-text token first if the model has one."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [*start, *tokenizer.encode(text)]


@paddle.no_grad()
def prompt_logits(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the logits after every token of each prompt, float32 [tokens, V].

    Of a model that writes codes they are those of all levels, behind a text and codes.
    """
    decoder.eval()
    logits = []
    for prompt in prompts:
        tokens = prompt[: decoder.config.max_position_embeddings]
        plan = AttentionPlan.build(np.full((1, 1, len(tokens), 1), len(tokens), np.int32))
        positions = paddle.arange(len(tokens)).unsqueeze(0)
        hidden = decoder(paddle.to_tensor([tokens]), positions, plan, **_codes(decoder.config, tokens))
        logits.append(_logits(decoder, hidden[0]).astype("float32").numpy())
    return logits


def _codes(config: ModelConfig, tokens: Sequence[int]) -> dict[str, paddle.Tensor]:
    """Return codes in the second half of a prompt, of a model that reads any: made of the tokens there."""
    if config.architecture.codes is None:
        return {}
    layout = code_layout(config)
    ids = np.asarray(tokens)[:, None]
    rows = np.array(layout.whole or layout.prompts) + ids % layout.codebook_size
    rows[: len(tokens) // 2] = -1
    return {"codes": paddle.to_tensor(rows[None])}


def _logits(decoder: Decoder, hidden_SH: paddle.Tensor) -> paddle.Tensor:
    """Return the logits [S, V] of tokens, or those of all levels of codes one after the other; of a reward model the
    scores [S, 1]."""
    if decoder.config.scored:
        return decoder.head(hidden_SH).unsqueeze(-1)
    if decoder.config.architecture.codes is None:
        return decoder.head(hidden_SH.unsqueeze(0))[0]
    levels = range(code_layout(decoder.config).levels)
    return paddle.concat([code_logits(decoder, hidden_SH, level) for level in levels], -1)
