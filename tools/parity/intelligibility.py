"""How well the sound of a fitted codec is understood, beside the original: word error rates of an outside recogniser.

    python tools/parity/intelligibility.py [--phrases 40] [--fit-phrases 600] [--write]

A residual k-means codec is fitted on phrases of digits from eight voices of eSpeak NG. Other voices say other phrases,
which are encoded and decoded, and CMU Sphinx (`pocketsphinx`, whose acoustic model comes in its wheel) writes down both
sounds by a grammar of digits. Both are as loud and have the same faint noise (-57 dB of the loudest sample), because
that recogniser hears words in digital silence; its penalty for inserted words was chosen on originals. The interval of
a ratio is where 95% of 2,000 draws of the phrases lie. Prints a Markdown table; `--write` puts it into
docs/benchmarks.md. Exit code 1: at 4 levels the word error rate is more than 1.2 times that of the originals.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/quickstart")]

import make_speech  # noqa: E402

from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig, fit_residual_kmeans  # noqa: E402
from tools.bench.marked import BENCHMARKS, measured_at, with_table  # noqa: E402

HELD_OUT_VOICES = ("en-us+f1", "en-us+m5", "en+m2")
MAY_GROW = 1.2
INSERTION_PENALTY = 1e-3
PEAK, NOISE = 0.7, 1e-3
DRAWS = 2000


@dataclass(frozen=True)
class Said:
    """A recording with its text: float32[samples] at 16 kHz."""

    text: str
    voice: str
    sound: np.ndarray


@dataclass
class Errors:
    """Edits and words of each phrase, int[phrases]."""

    edits: np.ndarray
    words: np.ndarray

    @property
    def rate(self) -> float:
        return float(self.edits.sum() / self.words.sum())


def spoken(fit: int, held_out: int) -> tuple[list[Said], list[Said]]:
    """Return recordings to fit on, and so many of each held-out voice, of phrases that are not among the former."""
    draw = random.Random("intelligibility")
    synthesiser = make_speech.Synthesiser()

    def phrase(text: str, voice: str, speed: tuple[int, int], pitch: tuple[int, int]) -> Said:
        made = make_speech.Phrase(
            text, voice, draw.randint(*speed), draw.randint(*pitch), 0.1, 0.1, PEAK, None, draw.randrange(2**31)
        )
        return Said(text, voice, make_speech.recording(synthesiser, made).astype(np.float32))

    def text(shortest: int) -> str:
        return " ".join(draw.choices(make_speech.DIGITS, k=draw.randint(shortest, 6)))

    tests = [phrase(text(4), voice, (140, 160), (50, 50)) for _ in range(held_out) for voice in HELD_OUT_VOICES]
    banned, fits = {said.text for said in tests}, []
    while len(fits) < fit:
        if (said := text(2)) not in banned:
            voice = make_speech.VOICES[len(fits) % len(make_speech.VOICES)]
            fits.append(phrase(said, voice, (130, 190), (30, 70)))
    return fits, tests


class Recogniser:
    """CMU Sphinx with a grammar of digits."""

    def __init__(self) -> None:
        from pocketsphinx import Config, Decoder, get_model_path

        with tempfile.NamedTemporaryFile("w", suffix=".gram") as grammar:
            grammar.write(f"#JSGF V1.0; grammar d; public <d> = ( {' | '.join(make_speech.DIGITS)} )+;")
            grammar.flush()
            model, words = get_model_path("en-us/en-us"), get_model_path("en-us/cmudict-en-us.dict")
            settings = {"hmm": model, "dict": words, "jsgf": grammar.name, "wip": INSERTION_PENALTY}
            self.decoder: Any = Decoder(Config(**settings, loglevel="FATAL"))

    def write_down(self, sound: np.ndarray) -> str:
        noise = np.random.default_rng(0).standard_normal(len(sound))
        sound = sound * (PEAK / max(float(np.abs(sound).max()), 1e-9)) + NOISE * noise
        self.decoder.start_utt()
        self.decoder.process_raw((sound * 32767).astype("<i2").tobytes(), full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return found.hypstr if found else ""


def errors(recogniser: Recogniser, tests: Sequence[Said], back: Callable[[np.ndarray], np.ndarray]) -> Errors:
    """Count the edits between each text and what the recogniser writes down of `back(sound)`."""
    import jiwer

    edits, words = [], []
    for said in tests:
        found = jiwer.process_words(said.text, recogniser.write_down(back(said.sound)))
        edits.append(found.substitutions + found.deletions + found.insertions)
        words.append(len(said.text.split()))
    return Errors(np.array(edits), np.array(words))


def ratio_interval(codec: Errors, original: Errors) -> tuple[float, float]:
    """Return where 95% of the ratios of error rates lie if other phrases of the kind had been drawn."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(DRAWS):
        drawn = rng.integers(len(codec.edits), size=len(codec.edits))
        ratios.append(codec.edits[drawn].sum() / max(1, original.edits[drawn].sum()))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def of_levels(codec: ResidualKMeans, levels: int, rounds: int) -> ResidualKMeans:
    """Return the codec with its first levels; one fitted with fewer levels has the same codebooks."""
    config = replace(codec.config, levels=levels, griffin_lim_rounds=rounds)
    return ResidualKMeans(config, codec.mean, codec.codebooks[:levels])


def row(title: str, found: Errors, original: Errors, tests: Sequence[Said], speed: str) -> str:
    cells = [title]
    for voice in HELD_OUT_VOICES:
        own = np.array([said.voice == voice for said in tests])
        there = Errors(found.edits[own], found.words[own])
        cells.append(f"{there.rate:.3f} ({there.rate / Errors(original.edits[own], original.words[own]).rate:.2f})")
    low, high = ratio_interval(found, original)
    ratio = f"{found.rate / original.rate:.2f} ({low:.2f} to {high:.2f})" if found is not original else "1"
    return f"| {' | '.join([*cells, f'{found.rate:.3f}', ratio, speed])} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phrases", type=int, default=40, help="of each of the three held-out voices")
    parser.add_argument("--fit-phrases", type=int, default=600)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    fits, tests = spoken(options.fit_phrases, options.phrases)
    seconds = sum(len(said.sound) for said in tests) / make_speech.RATE
    before = time.process_time()
    codec = fit_residual_kmeans((said.sound for said in fits), ResidualKMeansConfig(levels=8))
    fitting = time.process_time() - before
    recogniser = Recogniser()
    original = errors(recogniser, tests, lambda sound: sound)
    heads = [*HELD_OUT_VOICES, "all", "ratio, 95% interval", "s of a core to decode 1 s"]
    lines = [f"| sound | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    lines.append(row("original", original, original, tests, "-"))
    worst = 0.0
    for levels, rounds in ((4, 32), (4, 8), (2, 32), (8, 32)):
        one = of_levels(codec, levels, rounds)
        spent = 0.0

        def back(sound: np.ndarray, one: ResidualKMeans = one) -> np.ndarray:
            nonlocal spent
            codes, started = one.encode(sound), time.process_time()
            decoded = one.decode(codes)
            spent += time.process_time() - started
            return decoded

        found = errors(recogniser, tests, back)
        lines.append(row(f"{levels} levels, {rounds} rounds", found, original, tests, f"{spent / seconds:.3f}"))
        if (levels, rounds) == (ResidualKMeansConfig().levels, ResidualKMeansConfig().griffin_lim_rounds):
            worst = found.rate / original.rate
        print(lines[-1], file=sys.stderr, flush=True)
    fitted = sum(len(said.sound) for said in fits) / make_speech.RATE / 60
    lines += ["", f"{len(tests)} phrases of {seconds / 60:.1f} minutes; 8 levels fitted on {fitted:.0f} minutes in "]
    lines[-1] += f"{fitting:.0f} s of a core. "
    from importlib.metadata import version

    others = [f"{name} {version(name)}" for name in ("pocketsphinx", "espeakng-loader", "jiwer")]
    lines[-1] += measured_at("python tools/parity/intelligibility.py", others)
    print("\n".join(lines))
    if options.write:
        BENCHMARKS.write_text(with_table("intelligibility", "\n".join(lines), BENCHMARKS), encoding="utf-8")
    return int(worst > MAY_GROW)


if __name__ == "__main__":
    sys.exit(main())
