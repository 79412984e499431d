"""Speak with a model of ours, as `erniekit speak` does; the sound of the codes is left out, and so is its silence."""

from __future__ import annotations

from speaking_side import serve_speech  # isort: skip -- it finds the others
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from speaking_case import AR_SECONDS, CHUNK_SECONDS, LONG_SECONDS, SETTINGS, STEPS

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from erniekit.environment import import_paddle

import_paddle()

from erniekit.config.sections.speaking import SpeakingParameters
from erniekit.inference.sampling import Sampling
from erniekit.inference.speaking import Utterance
from erniekit.inference.speaking.sound import SoundSettings
from erniekit.inference.speaking.speaker import Speaking, SpeechModel


class NoSound:
    """In the place of the codec: a sample for each frame."""

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.zeros(codes.shape[1], np.float32)


def main() -> None:
    model = SpeechModel.load(Path(sys.argv[1]))
    model.__dict__["codec"] = NoSound()
    settings = SpeakingParameters(
        unmask_steps=STEPS,
        guidance_scale=SETTINGS["guidance_scale"],
        position_temperature=SETTINGS["position_temperature"],
    )
    how = Speaking(
        chunk_seconds=CHUNK_SECONDS,
        chunk_threshold=LONG_SECONDS,
        max_seconds=AR_SECONDS,
        sound=SoundSettings(keep_silence=True, pad=0.0, fade=0.0),
    )

    def speak(texts: tuple[str, ...]) -> Iterator[tuple[int, np.ndarray]]:
        utterances = [Utterance(text, number=number) for number, text in enumerate(texts)]
        for piece in model.speak(utterances, settings, Sampling(temperature=1.0, seed=1), how):
            yield piece.utterance, piece.codes

    serve_speech(speak)


main()
