"""Draw the plots of docs/audio.md: a log-mel spectrogram above its transcript, and the word error rate over the steps.

    python tools/docs/audio_plots.py [--output docs/audio]

Needs what `make quickstart-asr` leaves in output/quickstart. The same run gives the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from erniekit.data.media.clip import Clip  # noqa: E402
from erniekit.data.media.log_mel import log_mel  # noqa: E402
from erniekit.data.media.recording import read_clip  # noqa: E402

SPEECH, RUN = ROOT / "output/quickstart/speech", ROOT / "output/quickstart/asr"
MEL_BINS, HOP, RATE = 80, 160, 16_000
RECORD = 2  # of eval-unseen.jsonl
FILES = {"eval": "the 8 voices of the training data", "eval-unseen": "4 other voices"}


def new_plot(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = path.stem
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, dpi=100)
    print(f"{path}: {path.stat().st_size // 1024} KiB")


def draw_spectrogram(path: Path) -> None:
    """Draw what the encoder takes of a phrase; frequencies from below to above."""
    record = json.loads((SPEECH / "eval-unseen.jsonl").read_text(encoding="utf-8").splitlines()[RECORD])
    sound = read_clip(Clip(str(SPEECH / record["audio_path"])), RATE)
    features = log_mel(sound, MEL_BINS, -(-len(sound) // HOP))
    figure, axes = new_plot(8, 3)
    seconds = len(sound) / RATE
    axes.imshow(
        features, origin="lower", aspect="auto", cmap="magma", extent=(0, seconds, 0, MEL_BINS), interpolation="none"
    )
    noise = "no noise" if record["snr"] is None else f"noise {record['snr']} dB below"
    axes.set_xlabel(f"seconds\n“{record['text']}”  ({record['voice']}, {noise})")
    axes.set_ylabel("mel band")
    save(figure, path)


def word_error_rates(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and word error rates of each evaluated file, by the stem of its name."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in FILES}
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for source, figures in entry.get("eval_sources", {}).items():
            if "eval_wer" in figures and Path(source).stem in found:
                found[Path(source).stem].append((entry["step"], figures["eval_wer"]))
    return found


def draw_error_rates(path: Path) -> None:
    figure, axes = new_plot(8, 3.5)
    for name, points in word_error_rates(RUN / "training_log.jsonl").items():
        steps, rates = zip(*points, strict=True)
        axes.plot(steps, 100 * np.array(rates), marker="o", label=FILES[name])
    axes.axhline(10, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="word error rate, %", ylim=(0, None))
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/audio")
    output = parser.parse_args().output
    draw_spectrogram(output / "spectrogram.svg")
    draw_error_rates(output / "wer.svg")


if __name__ == "__main__":
    main()
