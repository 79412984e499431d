"""Tokens and texts that hold them, which the comparisons with transformers share."""

from __future__ import annotations

import random
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded_added_tokens.json"  # by tools/parity/record_added_tokens5.py
TOKENS = ("<|continue|>", "ab c", *(f"<|unit{number}|>" for number in range(30)), "<u", "<u1")
_PIECES = (
    *TOKENS[:9],
    "<|unit29|>",
    *TOKENS[-2:],
    "six",
    " apples",
    "\n",
    "  ",
    " ",
    "今天",
    "🦆",
    "<|unit",
    "30|>",
    "ab  c",
)


def _composed(count: int) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices(_PIECES, k=draw.randrange(1, 9))) for _ in range(count)]


TEXTS = ("", *TOKENS, *_composed(120))
