"""What is recorded of the package `omnivoice` and compared with it; imports nothing that needs Paddle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded"
SEED = 5
LEVELS, CODES, VOCABULARY = 4, 16, 56
RATE = 24_000  # of sounds; below 11,025 pydub resamples them
LLM = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 256,
    "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
SPOKEN = (
    "Hello there, world! How are you today?",
    "Dr. Smith and Mr. Brown met at No. 5 St. James Ave. on Feb. 3, i.e. yesterday. They talked; nobody listened.",
    "你好，世界！今天 天气 很好。我们去公园吧……",
    "こんにちは、元気ですか？ 안녕하세요. 반갑습니다!",
    "Ще не вмерла — नमस्ते दुनिया। مَرْحَبًا بِالْعَالَم ภาษาไทย ሰላም",
    'He said: "Go." (She left.) Then… nothing\nhappened\t at   all （really）',
    "[laughter] Well, [sigh] that [unknown] was it [question-en]",
    "3.14 is pi. 2 + 2 = 4? e.g. vs. approx. figures, 100%",
    "x",
    "...",
    "A. B. C. D. E.",
    "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
    "  Leading and trailing spaces. And some more words, so that it is long enough; is it? Yes!  ",
    "𠀀𠀁 rare 😀 signs Αθήνα Ἀθῆναι ﬁ Ａ１",
)
LENGTHS = (8, 20, 45, 1000)  # of pieces
REFERENCES = (None, ("Good morning.", 40), ("早上好", 31), ("Good morning, how do you do today?", 120))
SPEEDS = (1.0, 1.3, 0.7)
SCHEDULES = tuple(
    (codes, steps, shift)
    for codes in (8, 100, 777, 6000)
    for steps in (1, 2, 7, 16, 32, 50, 101)
    for shift in (0.1, 0.5, 1.0, 3.0)
)


def character_ids(text: str) -> list[int]:
    """The ids of a text for a tiny model."""
    return [1 + ord(character) % (VOCABULARY - 1) for character in text]


# Requests of one batch: text, frames, text and frames of a voice (or None), language, instruct.
TASKS: tuple[tuple[str, int, tuple[str, int] | None, str | None, str | None], ...] = (
    ("one two", 9, None, None, None),
    ("three", 6, ("four five", 7), "en", "female"),
)
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"num_step": 6, "guidance_scale": 0.0, "position_temperature": 0.0},
    "guided": {"num_step": 5, "guidance_scale": 2.0, "position_temperature": 0.0, "t_shift": 0.5},
    "penalty": {"num_step": 8, "guidance_scale": 1.0, "position_temperature": 0.0, "layer_penalty_factor": 0.3},
    "positions": {"num_step": 6, "guidance_scale": 2.0, "position_temperature": 5.0},
    "classes": {"num_step": 4, "guidance_scale": 2.0, "position_temperature": 1.0, "class_temperature": 0.8},
}


def voice_codes(frames: int) -> np.ndarray:
    """Codes int64 [C, T] of a voice."""
    return np.random.default_rng(frames).integers(0, CODES, (LEVELS, frames))


def sound(name: str, rate: int = RATE) -> np.ndarray:
    """A sound float32 [samples] with stretches of speech and of silence, in seconds."""
    stretches = {
        "gaps": ((0, 0.35), (1, 0.7), (0, 1.31), (1, 0.4), (0, 0.3), (1, 0.2), (0, 0.9)),
        "speech": ((1, 0.8004),),
        "silence": ((0, 1.5),),
        "edges": ((0, 0.043), (1, 0.3), (0, 0.6004), (1, 0.25), (0, 2.2)),
        "faint": ((1, 0.5), (0.02, 0.8), (1, 0.5), (0.004, 1.2), (1, 0.3)),
        "short": ((1, 0.05),),
    }[name]
    rng = np.random.default_rng(len(name))
    parts = [loud * 0.3 * rng.standard_normal(round(seconds * rate)) for loud, seconds in stretches]
    return np.clip(np.concatenate(parts) + 0.0005 * rng.standard_normal(sum(map(len, parts))), -1, 1).astype(np.float32)


SOUNDS = ("gaps", "speech", "silence", "edges", "faint", "short")


def described(kept: np.ndarray) -> list[Any]:
    """Return how many samples a sound has, and the hash of them as 16-bit integers."""
    samples = np.clip(kept * 32768.0, -32768, 32767).astype("<i2")
    return [len(samples), hashlib.sha256(samples.tobytes()).hexdigest()]


STORY = " ".join(
    f"Number {word} is here, and Dr. Brown counts on; nobody stops him." for word in ("one", "two", "three", "four") * 4
)
# What is asked for: text, text and frames of a voice (or None), duration, speed, seconds of a piece.
DIVIDED: tuple[tuple[str, tuple[str, int] | None, float | None, float | None, float], ...] = (
    ("Hello there, world!", None, None, None, 15.0),
    ("Hello there, world!", None, 2.5, None, 15.0),
    ("Hello there, world!", ("Good morning.", 40), None, 1.3, 15.0),
    (STORY, None, None, None, 15.0),
    (STORY, None, None, None, 6.0),
    (STORY, ("Good morning.", 40), None, None, 15.0),
    (STORY, ("Good morning.", 40), None, 0.8, 10.0),
    (STORY, ("Good morning.", 40), 70.0, None, 15.0),
)
