"""Recordings as codes, and the numbers with which the package omnivoice draws samples of them. Needs NumPy alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded_masked_codes.npz"
LEVELS, CODES, CHOICES = 4, 16, 16
SPECIAL_TOKENS = (
    "<|denoise|>", "<|lang_start|>", "<|lang_end|>", "<|instruct_start|>", "<|instruct_end|>", "<|text_start|>",
    "<|text_end|>",
)  # fmt: skip
RECORDS: tuple[dict[str, Any], ...] = (
    {"text": "one two"},
    {"text": "three", "language_id": "en"},
    {"text": "four five", "instruct": "female, low pitch"},
    {"text": "six", "language_id": "en", "instruct": "male"},
    {"text": "七 八", "text_pinyin": "qi1 ba1", "language_id": "zh"},
    {"text": "nine", "clean_start_token_idx": 3},
    {"text": "zero", "clean_start_token_idx": 0, "language_id": "en"},
    {"text": "十", "text_pinyin": "shi2", "instruct": "whisper", "clean_start_token_idx": 5},
)
OFTEN = {
    "mask_ratio": (0.0, 1.0), "prompt_ratio": (0.0, 0.3), "condition_dropout": 0.1, "language": 0.8, "instruct": 1.0,
    "only_instruct": 0.5, "pinyin": 0.3,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "as published": OFTEN,
    "rarely told": {**OFTEN, "language": 0.3, "instruct": 0.4, "pinyin": 0.7, "prompt_ratio": (0.2, 0.9)},
    "mostly dropped": {**OFTEN, "condition_dropout": 0.9},
    "all masked": {**OFTEN, "mask_ratio": (1.0, 1.0), "condition_dropout": 0.0, "only_instruct": 0.0},
}
TIMES = 4  # that each record is drawn in a run


def ids_of(text: str) -> list[int]:
    """The ids of a text: special tokens, and characters."""
    return [
        1 + SPECIAL_TOKENS.index(piece) if piece in SPECIAL_TOKENS else 10 + ord(piece)
        for piece in re.findall(r"<\|\w+\|>|.", text)
    ]


def frames_of(record: int) -> int:
    return 9 + 2 * record


def codes_of(record: int) -> np.ndarray:
    """int64[C, T]"""
    return np.random.default_rng(record).integers(0, CODES, (LEVELS, frames_of(record)))


def choices_of(time: int) -> np.ndarray:
    """float64[records, 16], the numbers that decide about each record."""
    return np.random.default_rng([time, 1]).random((len(RECORDS), CHOICES))


def masks_of(time: int, record: int) -> np.ndarray:
    """float64[C, T], the number that decides about each code."""
    return np.random.default_rng([time, record, 2]).random((LEVELS, frames_of(record)))
