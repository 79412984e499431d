"""Sound files and spectrograms for docs/speech.md: a phrase as recorded, through the codec, and as models say it.

python tools/parity/speaking.py [--work output/speaking]            # first: it trains the models
python tools/parity/speech_examples.py [--work output/speaking] [--number 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/quickstart")]

from tools.parity.intelligibility import Recogniser  # noqa: E402
from tools.parity.speaking import CONFIGS, held_out, read_sound  # noqa: E402

FOLDER = ROOT / "docs/speech"
RATE = 16_000


def sounds(work: Path, number: int) -> tuple[str, dict[str, np.ndarray]]:
    """Return a phrase, and its sounds by what made them."""
    from erniekit.codecs.open import open_codec

    said = held_out(work / "voice", number + 1)[number]
    codec = open_codec(work / "voice/codec")
    found = {"recording": said.sound, "codec": codec.decode(codec.encode(said.sound))}
    for name in CONFIGS:
        found[name] = read_sound(work / name.replace(" ", "-").lower() / "spoken" / f"{number:04d}.wav")
    return said.text, found


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """Draw the spectrograms below one another, with one axis of time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(found), 1, figsize=(8, 1.5 * len(found)), sharex=True, layout="constrained")
    for axes, (name, sound) in zip(rows, found.items(), strict=True):
        faint = 1e-6 * np.random.default_rng(0).standard_normal(len(sound))  # digital silence has no logarithm
        axes.specgram(sound + faint, NFFT=512, Fs=RATE, noverlap=384, vmin=-120, vmax=-30, cmap="magma")
        axes.set(ylabel="kHz", yticks=[0, 4000, 8000], yticklabels=["0", "4", "8"])
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set_facecolor("black")
    rows[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=80, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("output/speaking"), help="of tools/parity/speaking.py")
    parser.add_argument("--number", type=int, default=0, help="of the held-out phrase")
    options = parser.parse_args()
    import soundfile

    text, found = sounds(options.work.resolve(), options.number)
    FOLDER.mkdir(exist_ok=True)
    recogniser = Recogniser()
    print(f"text: {text}")
    for name, sound in found.items():
        soundfile.write(FOLDER / f"{name.replace(' ', '-').lower()}.flac", sound, RATE, subtype="PCM_16")
        print(f"{name}: {recogniser.write_down(sound)}")
    draw(found, FOLDER / "spectrograms.png")


if __name__ == "__main__":
    main()
