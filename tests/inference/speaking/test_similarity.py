"""Voices are compared by the embeddings of Resemblyzer, which is replaced here; tests/parity has the package itself."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from erniekit.inference.speaking import similarity as module
from erniekit.inference.speaking.similarity import open_voices, similarity

TONE = np.sin(np.arange(4000, dtype=np.float32) / 5)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Takes the loudness of the first and of the second half for a voice; what is faint is no speech."""

    class VoiceEncoder:
        def __init__(self, device: str, verbose: bool) -> None:
            assert device == "cpu" and not verbose

        def embed_utterance(self, prepared: np.ndarray) -> np.ndarray:
            half = len(prepared) // 2
            return np.array([np.abs(prepared[:half]).mean(), np.abs(prepared[half:]).mean()])

    def preprocess_wav(sound: np.ndarray, source_sr: int) -> np.ndarray:
        assert sound.dtype == np.float32 and source_sr == 8000
        return sound if np.abs(sound).max() > 0.01 else sound[:0]

    fake: Any = ModuleType("resemblyzer")
    fake.VoiceEncoder, fake.preprocess_wav = VoiceEncoder, preprocess_wav
    fake.__spec__ = ModuleSpec("resemblyzer", None)
    monkeypatch.setitem(sys.modules, "resemblyzer", fake)
    return fake


def test_a_voice_is_like_itself_and_unlike_another(package: ModuleType) -> None:
    voices = open_voices()
    assert voices is not None
    fading = TONE * np.linspace(1, 0, len(TONE), dtype=np.float32)
    one, other = voices.embedding(TONE, 8000), voices.embedding(fading, 8000)
    assert similarity(one, one) == pytest.approx(1.0) and similarity(one, other) < 0.95
    assert similarity(one, voices.embedding(TONE / 2, 8000)) == pytest.approx(1.0)


@pytest.mark.parametrize("sound", [TONE[:0], np.zeros(4000, np.float32), TONE / 1000], ids=["none", "zeros", "faint"])
def test_nobody_is_like_nobody(package: ModuleType, sound: np.ndarray) -> None:
    voices = open_voices()
    assert voices is not None and voices.embedding(sound, 8000) is None
    assert similarity(None, voices.embedding(TONE, 8000)) == 0.0


def test_where_the_package_is_not_installed_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(module, "is_importable", lambda name: False)
    assert open_voices() is None
    assert logged[-1].startswith("no speaker_similarity: Resemblyzer is not installed (pip install resemblyzer")
