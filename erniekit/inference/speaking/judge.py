"""Who writes down what a model has said, so that its words can be compared with the texts: `speech_judge`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from erniekit.build.speech_checks import POCKETSPHINX
from erniekit.errors import ConfigurationError
from erniekit.inference.error_rates import ErrorRates
from erniekit.inference.speaking.sound_files import write_sound

HEARS_AT = 16_000  # samples a second, of CMU Sphinx's English model
PEAK, NOISE = 0.7, 1e-3  # it hears words in digital silence, so all sound is equally loud over a faint noise
INSERTION_PENALTY = 1e-3
MANY = 5  # words in a message


class Judge(Protocol):
    """Writes down what is said."""

    def write_down(self, sound: np.ndarray, sampling_rate: int) -> str:
        """Return the words in float32 [samples], "" if there are none."""
        ...


def open_judge(name: str, texts: Iterable[str]) -> Judge:
    """Open the judge of a `speech_judge`.

    Args:
        name: pocketsphinx, or the folder of a model that transcribes.
        texts: that are said; CMU Sphinx listens for their words only.

    Raises:
        UserError: it cannot be opened, or does not know a word.
    """
    return Sphinx(words_of(texts)) if name == POCKETSPHINX else Listener(Path(name).expanduser())


def words_of(texts: Iterable[str]) -> list[str]:
    """Return the distinct words of some texts in lower case, without punctuation."""
    return sorted({word for text in texts for word in plain(text).split()})


def plain(text: str) -> str:
    """Return the words of an English text as CMU Sphinx writes them."""
    return " ".join(re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower()))


def heard(judge: Judge, text: str, sound: np.ndarray, sampling_rate: int) -> str:
    """Return what a judge hears of a text, for people."""
    words = judge.write_down(sound, sampling_rate)
    return f'heard: "{words}" (WER {ErrorRates().add(plain(text), plain(words))["wer"]:.2f})'


class Sphinx:
    """CMU Sphinx with a grammar of some words in any order."""

    def __init__(self, words: list[str]) -> None:
        from pocketsphinx import Config, Decoder, get_model_path

        model, dictionary = get_model_path("en-us/en-us"), get_model_path("en-us/cmudict-en-us.dict")
        known = {
            line.split(maxsplit=1)[0] for line in Path(dictionary).read_text(encoding="utf-8").splitlines() if line
        }
        if unknown := [word for word in words if word not in known]:
            raise ConfigurationError(
                f"`speech_judge: {POCKETSPHINX}`: it does not know {', '.join(unknown[:MANY])}, which held-out texts "
                "have\n  Write numbers as words, or name the folder of a model that transcribes."
            )
        if not words:
            raise ConfigurationError(f"`speech_judge: {POCKETSPHINX}`: the held-out texts have no word to listen for")
        with tempfile.NamedTemporaryFile("w", suffix=".gram", encoding="utf-8") as grammar:
            grammar.write(f"#JSGF V1.0; grammar words; public <words> = ( {' | '.join(words)} )+;")
            grammar.flush()
            settings = {"hmm": model, "dict": dictionary, "jsgf": grammar.name, "wip": INSERTION_PENALTY}
            self._decoder: Any = Decoder(Config(**settings, loglevel="FATAL"))

    def write_down(self, sound: np.ndarray, sampling_rate: int) -> str:
        """See `Judge`; equal sound gives equal words, whatever was heard before."""
        from erniekit.codecs.resampling import resample

        if not len(sound):
            return ""
        sound = resample(sound.astype(np.float32), sampling_rate, HEARS_AT)
        noise = np.random.default_rng(0).standard_normal(len(sound))
        sound = sound * (PEAK / max(float(np.abs(sound).max()), 1e-9)) + NOISE * noise
        self._decoder.start_utt()
        self._decoder.process_raw((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return str(found.hypstr) if found else ""


class Listener:
    """A model of ours that transcribes."""

    def __init__(self, folder: Path) -> None:
        from erniekit.inference.engine import ChatModel

        self._model = ChatModel.load(folder)

    def write_down(self, sound: np.ndarray, sampling_rate: int) -> str:
        """See `Judge`."""
        from erniekit.inference.transcribe import Transcript, TranscriptionSettings, transcribe

        if not len(sound):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "said.wav"
            write_sound(path, sound, sampling_rate)
            (result,) = transcribe(self._model, [path], TranscriptionSettings())
        return result.text if isinstance(result, Transcript) else ""
