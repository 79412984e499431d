"""Resemblyzer's embeddings tell the voices of a synthesiser apart, whatever they say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from erniekit.inference.speaking.similarity import open_voices, similarity

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/quickstart"))

pytestmark = pytest.mark.parity

PHRASES = (
    "three five nine one, and nobody had called that number before",
    "she wrote all of it down, because it was late in the evening",
)


def test_a_voice_is_recognised_by_what_else_it_says() -> None:
    from make_speech import RATE, Phrase, Synthesiser

    voices, synthesiser = open_voices(), Synthesiser()
    assert voices is not None

    def embedding(voice: str, text: str) -> np.ndarray | None:
        return voices.embedding(synthesiser.say(Phrase(text, voice, 150, 50, 0.0, 0.0, 1.0, None, 1)), RATE)

    one, again = embedding("en-us+m3", PHRASES[0]), embedding("en-us+m3", PHRASES[1])
    other = embedding("en-us+f1", PHRASES[0])
    assert one is not None and one.shape == (256,) and np.linalg.norm(one) == pytest.approx(1.0, abs=1e-4)
    assert similarity(one, one) == pytest.approx(1.0, abs=1e-5)
    assert similarity(one, again) > similarity(one, other) + 0.1
    assert voices.embedding(np.zeros(RATE, np.float32), RATE) is None
