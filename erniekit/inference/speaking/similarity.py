"""How alike two voices sound: the cosine between their embeddings by Resemblyzer, where it is installed.

Its encoder is that of Wan et al. (2018, arXiv:1710.10467), and its weights are in its wheel. It is no dependency of
ERNIEKit, because it needs torch and librosa.
"""

from __future__ import annotations

import logging

import numpy as np

from erniekit.build.speech_checks import RESEMBLYZER, VOICES_MISSING
from erniekit.environment import is_importable

logger = logging.getLogger(__name__)

SILENT = 1e-4  # the loudest sample of a sound in which nobody speaks


def open_voices() -> Voices | None:
    """Open the encoder of voices; None, and a line that says so, where it is not installed."""
    if is_importable(RESEMBLYZER):
        return Voices()
    logger.info(f"no speaker_similarity: {VOICES_MISSING}")
    return None


class Voices:
    """Tells voices apart."""

    def __init__(self) -> None:
        from resemblyzer import VoiceEncoder, preprocess_wav

        self._prepared = preprocess_wav  # resampled, louder, without long silence
        self._encoder = VoiceEncoder("cpu", verbose=False)

    def embedding(self, sound: np.ndarray, sampling_rate: int) -> np.ndarray | None:
        """Return the embedding of the voice in float32 [samples], of length 1; None: nobody speaks."""
        if not len(sound) or float(np.abs(sound).max()) < SILENT:
            return None
        prepared = self._prepared(sound.astype(np.float32), source_sr=sampling_rate)
        return np.asarray(self._encoder.embed_utterance(prepared), np.float32) if len(prepared) else None


def similarity(one: np.ndarray | None, other: np.ndarray | None) -> float:
    """Return the cosine between two embeddings, at most 1; 0 where nobody speaks."""
    return 0.0 if one is None or other is None else float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
