"""Batches of random codes for the tiny models that speak, laid out in several ways."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from erniekit.data.batch import Batch, CodePart
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout
from tests.model.tiny_speech import CODES, LEVELS, omnivoice_config, vall_e_config

SEPARATOR = 1


def speaking_config(objective: str) -> ModelConfig:
    return (omnivoice_config if objective == "masked" else vall_e_config)(llm={"num_hidden_layers": 4})


def documents(objective: str, seed: object, count: int) -> list[Sample]:
    """Random documents of an objective, of different lengths; of AR and NAR one of each level and one transcript."""
    random = np.random.default_rng(seed)  # type: ignore[arg-type]
    config = speaking_config(objective)
    if objective == "masked":
        return [masked_document(config, random) for _ in range(count)]
    kinds = [*range(LEVELS), None]
    return [ar_nar_document(config, random, kinds[number % len(kinds)]) for number in range(count)]


def masked_document(config: ModelConfig, random: np.random.Generator) -> Sample:
    """A text and frames of which some codes are masked and predicted."""
    layout = code_layout(config)
    words, frames = int(random.integers(2, 5)), int(random.integers(3, 7))
    written = random.integers(0, CODES, (frames, LEVELS))
    masked = random.random((frames, LEVELS)) < 0.6
    codes, labels = _empty(words + frames)
    codes[words:] = np.where(masked, CODES, written) + np.array(layout.whole)
    labels[words:] = np.where(masked, written, IGNORE_INDEX)
    ids = np.zeros(words + frames, np.int32)
    ids[:words] = random.integers(2, config.vocab_size, words)
    arrays = {"codes": codes, "code_labels": labels}
    return Sample(ids, np.full(len(ids), IGNORE_INDEX, np.int32), arrays=arrays, causal=False, seconds=frames / 10)


def ar_nar_document(config: ModelConfig, random: np.random.Generator, level: int | None) -> Sample:
    """A text, a prompt and the response of a level, in which the targets of the text and of the prompt have labels on
    level 0; without a level the transcript of a response."""
    layout = code_layout(config)
    words, prompt, frames = (int(random.integers(2, 5)) for _ in range(3))
    said = random.integers(0, CODES, (frames, LEVELS))
    before = random.integers(0, CODES, (prompt, LEVELS))
    text = random.integers(2, config.vocab_size, words)
    length = words + prompt + frames + 2
    codes, labels = _empty(length)
    ids, text_labels = np.full(length, SEPARATOR, np.int32), np.full(length, IGNORE_INDEX, np.int32)
    part = np.zeros(length, np.int8)
    assert layout.written is not None
    if level is None:  # response, separator, text
        codes[:frames, 0] = layout.written + said[:, 0]
        ids[frames + 1 : frames + 1 + words] = text
        text_labels[frames : frames + words] = text
        part[frames : frames + words] = CodePart.TRANSCRIPT
    else:
        ids[:words] = text
        prompt_at, response_at = words + 1, words + prompt + 2
        heard = max(1, level)
        codes[prompt_at : prompt_at + prompt, :heard] = before[:, :heard] + np.array(layout.prompts[:heard])
        if level:
            codes[response_at:, :level] = said[:, :level] + np.array(layout.whole[:level])
            labels[response_at:, level] = said[:, level]
            part[response_at:] = CodePart.RESPONSE
        else:
            codes[response_at:, 0] = layout.written + said[:, 0]
            labels[response_at - 1 :, 0] = [*said[:, 0], CODES]  # the last one is the end
            part[response_at - 1 :] = CodePart.RESPONSE
            text_labels[: words - 1] = text[1:]
            part[: words - 1] = CodePart.TEXT
            labels[prompt_at : prompt_at + prompt - 1, 0] = before[1:, 0]
            part[prompt_at : prompt_at + prompt - 1] = CodePart.PROMPT
    arrays = {"codes": codes, "code_labels": labels, "code_part": part}
    return Sample(ids, text_labels, arrays=arrays, causal=not level, seconds=frames / 10)


def batch_of(objective: str, rows: Sequence[Sequence[Sample]]) -> Batch:
    """Lay documents out in rows."""
    arrays = ("codes", "code_labels", "code_part")[: 2 if objective == "masked" else 3]
    indices = [[0] * len(row) for row in rows]
    return collate(rows, indices, 0, arrays=arrays, both_ways=True, levels=LEVELS)


def _empty(length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((length, LEVELS), -1, np.int64), np.full((length, LEVELS), IGNORE_INDEX, np.int64)
