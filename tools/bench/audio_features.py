"""Recordings to features: audio seconds per second of one core, beside transformers' WhisperFeatureExtractor.

    tools/bench/peers/make.sh .peers torch     # once; without it our own figures alone are shown
    python tools/bench/audio_features.py [--rounds 5] [--seconds 1] [--environments .peers] [--write]

Features: the log-mel spectrogram of a sound of some seconds in a window that is padded with silence to others. The sum
of both sides' features is compared. Reading: files of 20 seconds, decoded and resampled to 16 kHz mono, from the page
cache. One thread each, in turn; the median of the rounds. Prints Markdown tables; `--write` puts them into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # before NumPy is imported
    os.environ[threads] = "1"

import numpy as np  # noqa: E402
from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table  # noqa: E402
from workers import Worker  # noqa: E402

sys.path.insert(0, str(ROOT))

from erniekit.data.media.clip import Clip  # noqa: E402
from erniekit.data.media.log_mel import log_mel  # noqa: E402
from erniekit.data.media.recording import clip_length, read_clip  # noqa: E402

SIDE = ROOT / "tools/bench/sides/log_mel_theirs.py"
CASES = ((30, 30), (4, 30), (4, 4), (1, 30))  # seconds of sound, of the window
FILES = (  # title, name, samples a second, channels
    ("wav, 16 kHz", "s.wav", 16_000, 1),
    ("wav, 44.1 kHz stereo", "s.wav", 44_100, 2),
    ("flac, 16 kHz", "s.flac", 16_000, 1),
    ("flac, 48 kHz", "s.flac", 48_000, 1),
    ("mp3, 44.1 kHz stereo", "s.mp3", 44_100, 2),
    ("ogg, 24 kHz", "s.ogg", 24_000, 1),
)
FILE_SECONDS = 20


def seconds_of(call: Callable[[], object], enough: float) -> float:
    """Of one call, of as many as take `enough` seconds together."""
    call()
    calls, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < enough or not calls:
        call()
        calls += 1
    return passed / calls


def product_rate() -> float:
    """GF/s of a float32 product on this core, of NumPy's library."""
    a = np.random.default_rng(0).random((1024, 1024), dtype=np.float32)
    return 2 * 1024**3 / seconds_of(lambda: a @ a, 0.3) / 1e9


def features(mel_bins: int, sound_seconds: int, window: int, options: argparse.Namespace, peer: Worker | None) -> str:
    """A row."""
    samples, frames = 16_000 * sound_seconds, 100 * window
    sound = np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32)
    rates: dict[str, list[float]] = {"ours": [], "numpy": [], "torch": []}
    total = float(log_mel(sound, mel_bins, frames).sum(dtype=np.float64))
    for _ in range(options.rounds):
        ours = seconds_of(lambda: log_mel(sound, mel_bins, frames), options.seconds)
        rates["ours"].append(sound_seconds / ours)
        for kind in ("numpy", "torch") if peer else ():
            assert peer
            asked = {"kind": kind, "mel_bins": mel_bins, "samples": samples, "frames": frames}
            once = peer.run(**asked, calls=1)
            if abs(once["total"] - total) > 1e-5 * mel_bins * frames:
                raise SystemExit(f"the features differ: {total} and {once['total']} ({kind})")
            again = peer.run(**asked, calls=max(1, round(options.seconds / once["seconds"])))
            rates[kind].append(sound_seconds / again["seconds"])
    cells = [f"{sound_seconds} s in {window} s", str(mel_bins), told(rates["ours"])]
    for kind in ("numpy", "torch"):
        if not peer:
            cells += ["-", "-"]
            continue
        ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates[kind], strict=True)]
        cells += [told(rates[kind]), f"{statistics.median(ratios):.1f}"]
    return f"| {' | '.join(cells)} |"


def told(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"


def reading(title: str, name: str, rate: int, channels: int, folder: Path, options: argparse.Namespace) -> str:
    """A row."""
    import soundfile

    clip = Clip(str(folder / name))
    soundfile.write(clip.path, np.random.default_rng(0).normal(0, 0.1, (rate * FILE_SECONDS, channels)), rate)
    rates = [FILE_SECONDS / seconds_of(lambda: read_clip(clip), options.seconds) for _ in range(options.rounds)]
    header = [seconds_of(lambda: clip_length(clip), options.seconds / 10) * 1e6 for _ in range(options.rounds)]
    return f"| {title} | {told(rates)} | {statistics.median(header):,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    torch = options.environments / "torch/bin/python"
    peer = Worker([str(torch), str(SIDE)], 1) if torch.exists() else None
    heads = "audio s / s, ours | transformers, NumPy | ratio | transformers, torch | ratio"
    lines = [f"| sound in window | mel bins | {heads} |", "|---|" + "---:|" * 6]
    lines += [features(bins, *case, options, peer) for bins in (80, 128) for case in CASES]
    lines += ["", "| file | audio s / s, read and resampled | µs, its length |", "|---|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        lines += [reading(*file, Path(folder), options) for file in FILES]
    lines += ["", f"One core; its product: {product_rate():.0f} GF/s."]
    print("\n".join(lines))
    if peer:
        peer.close()
    if options.write:
        others = versions_in(torch, "torch", "transformers") if peer else []
        others += [f"{name} {__import__(name).__version__}" for name in ("soundfile", "soxr")]
        table = "\n".join([*lines[:-1], f"{lines[-1]} {measured_at('python tools/bench/audio_features.py', others)}"])
        BENCHMARKS.write_text(with_table("audio-features", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
