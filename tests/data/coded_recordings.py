"""Recordings as codes that lie in memory, as the token cache holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.code_reader import SpeechFacts
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.drawing import Drawing
from erniekit.data.masked_codes import MaskedCodes, StyleTokens
from erniekit.data.token_cache import TokenArrays
from erniekit.data.units import CODES

LEVELS, CODEBOOK_SIZE, FRAME_RATE = 4, 16, 25.0
STYLE = StyleTokens((1,), (2,), (3,), (4,), (5,), (6,), (7,), (8, 9))
PROMPT_ROWS, WRITTEN_ROW, WHOLE_ROWS = (0, 16, 32, 48), 64, (81, 97, 113)


def recordings(
    count: int,
    *,
    seed: int = 0,
    speakers: int = 5,
    frames: tuple[int, int] = (5, 40),
    rich: bool = True,
    levels: int = LEVELS,
) -> TokenArrays:
    """Return `count` recordings by some speakers.

    Args:
        rich: about half of them have pinyin, a language, an instruct and a noisy prompt each.
    """
    random = np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    codes: list[np.ndarray] = []
    spoken = np.zeros((count, 12), np.int32)
    for number in range(count):
        there = random.random(4) < (0.5 if rich else 0)
        sizes = [int(random.integers(3, 9)), *(int(size) for size in random.integers(1, 5, 3) * there[:3])]
        length = int(random.integers(*frames))
        ids += [random.integers(100, 200, size).astype(np.int32) for size in sizes]
        codes.append(random.integers(0, CODEBOOK_SIZE, (levels, length)).astype(np.uint16))
        clean_start = int(random.integers(0, length)) if there[3] else -1
        milliseconds = round(1000 * length / FRAME_RATE)
        spoken[number] = [*sizes, length, clean_start, number % speakers, -1, 0, 0, 0, milliseconds]
    facts = SpeechFacts(
        levels=levels, codebook_size=CODEBOOK_SIZE, frame_rate=FRAME_RATE, digest="",
        speakers=tuple(map(str, range(speakers))), alone=0, seconds=float(spoken[:, -1].sum()) / 1000, files=(),
        similar=(),
    )  # fmt: skip
    return TokenArrays(
        np.concatenate(ids),
        np.empty(0, np.int32),
        np.concatenate(([0], np.cumsum(spoken[:, :4].sum(axis=1)))),
        np.arange(1, count + 1, dtype=np.int32),
        {**facts.metadata(), "counts": {}, "unused_fields": []},
        spoken=spoken.ravel(),
        codes=np.concatenate([each.ravel() for each in codes]),
        code_offsets=np.concatenate(([0], np.cumsum([each.size for each in codes]))),
    )


def masked(**changes: Any) -> MaskedCodes:
    """Return the masked codes of the package's own ratios, apart from the changes."""
    values: dict[str, Any] = {
        "levels": LEVELS, "codebook_size": CODEBOOK_SIZE, "mask_id": CODEBOOK_SIZE, "frame_rate": FRAME_RATE,
        "seed": 42, "mask_ratio": (0.0, 1.0), "prompt_ratio": (0.0, 0.3), "condition_dropout": 0.1, "language": 0.8,
        "instruct": 0.9, "only_instruct": 0.5, "pinyin": 0.3, "tokens": tuple(STYLE), "max_seq_len": 1000,
    }  # fmt: skip
    return MaskedCodes(**{**values, **changes})


def ar_nar(**changes: Any) -> ArNarCodes:
    """Return codes that are written level by level, with every choice open, apart from the changes."""
    values: dict[str, Any] = {
        "levels": LEVELS, "codebook_size": CODEBOOK_SIZE, "frame_rate": FRAME_RATE, "seed": 42,
        "tasks": ("tts", "tts", "continuation", "stt"), "level_weights": (4.0, 2.0, 1.0, 1.0),
        "prompt_seconds": (0.2, 0.8), "prompt_sources": (1.0, 0.0, 1.0), "prompt_utterances": 2,
        "condition_dropout": 0.1, "prompt_dropout": 0.1, "language": 0.8, "text_loss": True, "prompt_loss": True,
        "both_ways": True, "restarts_positions": False, "separator": 10, "level_ids": (11, 12, 13, 14),
        "task_ids": (("continuation", 15), ("stt", 16)), "text_ends": (17, 18), "language_ends": (19, 20),
        "prompt_rows": PROMPT_ROWS, "written_row": WRITTEN_ROW, "whole_rows": WHOLE_ROWS, "max_seq_len": 1000,
        "space": (21,),
    }  # fmt: skip
    return ArNarCodes(**{**values, **changes})


def dataset(drawing: Drawing, *sources: TokenArrays) -> Dataset:
    """Return the dataset of some sources."""
    named = [Source(Path(f"speech-{number}.jsonl"), CODES) for number in range(len(sources))]
    return Dataset(named, sources, pad_id=0, fingerprint="", drawing=drawing)
