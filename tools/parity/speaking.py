"""How well the speech of models that learnt to speak is understood, beside the original and beside the codec alone.

    python tools/parity/speaking.py [--minutes 30] [--work output/speaking] [--write]
    python tools/parity/speaking.py --codecs

A voice of eSpeak NG says digits (tools/quickstart/make_voice.py); tiny models with random weights learn to say them, by
the configurations of the quickstart, one by masked codes and one by AR and NAR. Both speak phrases that no training
record has, and CMU Sphinx, which hears digits only, writes them down (as tools/parity/intelligibility.py, whose
interval of a ratio is meant here, too). Beside them stand the originals, their codes decoded, a model that has not
learnt, and random codes, which have to be bad. Prints a Markdown table; `--write` puts it into docs/benchmarks.md. Exit
code 1: a model's word error rate is more than 1.5 times that of the codec.

`--codecs` measures codecs of other frame rates, levels and sizes on the same phrases, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/quickstart")]

import make_voice  # noqa: E402

from erniekit.codecs.residual_kmeans import ResidualKMeansConfig, fit_residual_kmeans  # noqa: E402
from erniekit.codecs.spectrogram import MelFrames  # noqa: E402
from tools.bench.marked import BENCHMARKS, measured_at, with_table  # noqa: E402
from tools.parity.intelligibility import Errors, Recogniser, Said, errors, of_levels, ratio_interval  # noqa: E402

MAY_GROW = 1.5
TRIED_EPOCHS = 0.25  # which tell how many epochs there is time for
CONFIGS = {"masked codes": "tts", "AR and NAR": "tts-ar-nar"}
NOT_JUDGED = ("do_eval=false", "eval_answers=0", "speech_judge=", "metric_for_best_model=eval_loss", "save_strategy=no")


def erniekit(*words: str) -> None:
    """Run a command; it prints to standard error."""
    subprocess.run([sys.executable, "-m", "erniekit", *words], cwd=ROOT, check=True, stdout=sys.stderr)


def read_sound(path: Path) -> np.ndarray:
    import soundfile

    sound, rate = soundfile.read(path, dtype="float32")
    assert rate == 16_000, path
    return sound


def held_out(folder: Path, count: int | None) -> list[Said]:
    """Return the held-out recordings."""
    records = [json.loads(line) for line in (folder / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Said(each["text"], each["speaker"], read_sound(folder / each["audio_path"])) for each in records][:count]


def codes_of_the_voice(work: Path) -> None:
    """Make recordings, codec and codes in `work`, unless they are there."""
    voice = work / "voice"
    if not (voice / "codec/config.json").exists():
        make_voice.write(voice)
    for name in make_voice.COUNTS:
        folder = work / f"codes-{name}"
        if not (folder / "data.lst").exists():
            erniekit(
                "codes", "examples/configs/quickstart/tts-codes.yaml", f"train_dataset_path={voice / name}.jsonl",
                f"codec={voice / 'codec'}", f"output_dir={folder}",
            )  # fmt: skip


def trained(work: Path, name: str, epochs: float, *others: str) -> Path:
    """Train by a configuration of the quickstart; return the folder of the model."""
    folder = work / name.replace(" ", "-").lower()
    erniekit(
        "train", f"examples/configs/quickstart/{CONFIGS[name]}.yaml", f"output_dir={folder}",
        f"train_dataset_path={work / 'codes-train'}", f"eval_dataset_path={work / 'codes-eval'}",
        f"num_train_epochs={epochs:g}", *NOT_JUDGED, *others,
    )  # fmt: skip
    return folder


def spoken(work: Path, model: Path, tests: Sequence[Said], options: Sequence[str]) -> list[np.ndarray]:
    """Let a model say the texts of held-out recordings; what it cannot say is silence."""
    texts, folder = work / "texts.jsonl", model / "spoken"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier model; no sound is overwritten
    lines = [json.dumps({"text": said.text, "id": f"{number:04d}"}) for number, said in enumerate(tests)]
    texts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = ["speak", str(model), "--texts", str(texts), "--output", str(folder), *options]
    done = subprocess.run([sys.executable, "-m", "erniekit", *command], cwd=ROOT, check=False)
    if done.returncode not in (0, 2):
        sys.exit(done.returncode)
    paths = [folder / f"{number:04d}.wav" for number in range(len(tests))]
    return [read_sound(path) if path.exists() else np.zeros(16_000, np.float32) for path in paths]


def understood(recogniser: Recogniser, tests: Sequence[Said], sounds: Sequence[np.ndarray]) -> Errors:
    others = iter(sounds)
    return errors(recogniser, tests, lambda _: next(others))


def row(title: str, found: Errors, codec: Errors, note: str) -> str:
    low, high = ratio_interval(found, codec)
    ratio = "1" if found is codec else f"{found.rate / codec.rate:.2f} ({low:.2f} to {high:.2f})"
    return f"| {title} | {int(found.edits.sum())} of {int(found.words.sum())} | {found.rate:.3f} | {ratio} | {note} |"


def noise(codec: object, tests: Sequence[Said]) -> list[np.ndarray]:
    """Random codes as sound, as long as the recordings."""
    rng = np.random.default_rng(0)
    frames = [codec.encode(said.sound).shape for said in tests]  # type: ignore[attr-defined]
    return [codec.decode(rng.integers(0, make_voice.CODES, shape)) for shape in frames]  # type: ignore[attr-defined]


def compare(work: Path, minutes: float, count: int | None, names: Sequence[str]) -> tuple[list[str], float]:
    """Train, speak and judge; return the lines of a table, and the worst ratio."""
    from erniekit.codecs.open import open_codec

    codes_of_the_voice(work)
    tests, recogniser = held_out(work / "voice", count), Recogniser()
    codec = open_codec(work / "voice/codec")
    original = errors(recogniser, tests, lambda sound: sound)
    decoded = errors(recogniser, tests, lambda sound: codec.decode(codec.encode(sound)))
    lines = [
        "| sound | wrong words | WER | times the codec's, 95% interval | trained for |",
        "|---|---:|---:|---:|---|",
    ]
    lines.append(row("original", original, decoded, "-"))
    lines.append(row("the codec", decoded, decoded, "-"))
    lines.append(row("random codes", understood(recogniser, tests, noise(codec, tests)), decoded, "-"))
    records = map(json.loads, (work / "voice/train.jsonl").read_text(encoding="utf-8").splitlines())
    word = next(record for record in records if " " not in record["text"])  # about as long as prompts of the training
    voice = ("--voice", str(work / "voice" / word["audio_path"]), "--voice-text", word["text"])
    bare = (
        "--keep-silence",
        "--pad",
        "0",
        "--fade",
        "0",
    )  # as the recordings are: the recogniser hears words in silence
    options = {
        "masked codes": (*bare, "--unmask-steps", "16", "--position-temperature", "0"),
        "AR and NAR": (*bare, *voice, "--temperature", "0.7", "--max-seconds", "6"),
    }
    worst = 0.0
    for name in names:
        untrained = trained(work, name, 1, "max_steps=1", "warmup_ratio=0", "learning_rate=1e-9")
        before = understood(recogniser, tests, spoken(work, untrained, tests, options[name]))
        lines.append(row(f"{name}, random weights", before, decoded, "-"))
        began = time.monotonic()
        trained(work, name, TRIED_EPOCHS)
        epochs = round(max(1.0, TRIED_EPOCHS * 60 * minutes / (time.monotonic() - began)), 1)
        began = time.monotonic()
        model = trained(work, name, epochs)
        took = time.monotonic() - began
        found = understood(recogniser, tests, spoken(work, model, tests, options[name]))
        lines.append(row(name, found, decoded, f"{epochs:g} epochs, {took / 60:.0f} minutes"))
        worst = max(worst, found.rate / decoded.rate)
        print("\n".join(lines[-2:]), file=sys.stderr, flush=True)
    return lines, worst


def codecs(work: Path, count: int | None) -> list[str]:
    """Return a table of codecs that differ in frame rate, levels and size."""
    codes_of_the_voice(work)
    voice, recogniser = work / "voice", Recogniser()
    tests = held_out(voice, count)
    train = sorted((voice / "train").glob("*.flac"))[:600]
    original = errors(recogniser, tests, lambda sound: sound)
    lines = ["| frames a second | window, ms | levels | codes | wrong words | WER |", "|---:|---:|---:|---:|---:|---:|"]
    lines.append(
        f"| original | | | | {int(original.edits.sum())} of {int(original.words.sum())} | {original.rate:.3f} |"
    )
    for hop, window in ((160, 512), (256, 512), (256, 1024), (400, 1024), (512, 1024)):
        for size in (64, 128, 256):
            config = ResidualKMeansConfig(MelFrames(hop_length=hop, n_fft=window), levels=4, codebook_size=size)
            codec = fit_residual_kmeans(map(read_sound, train), config)
            for levels in (2, 4):
                one = of_levels(codec, levels, config.griffin_lim_rounds)
                found = errors(recogniser, tests, lambda sound, one=one: one.decode(one.encode(sound)))
                milliseconds = f"{1e3 * window / make_voice.make_speech.RATE:g}"
                cells = (
                    f"{config.frames.frame_rate:g}",
                    milliseconds,
                    levels,
                    size,
                    int(found.edits.sum()),
                    f"{found.rate:.3f}",
                )
                lines.append(f"| {' | '.join(map(str, cells))} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training, for each model")
    parser.add_argument("--phrases", type=int, help="fewer than all 120 held-out ones")
    parser.add_argument("--only", choices=CONFIGS, help="one of the models")
    parser.add_argument("--codecs", action="store_true", help="compare codecs; train nothing")
    parser.add_argument("--work", type=Path, default=Path("output/speaking"), help="recordings, codes and models")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    worst = 0.0
    if options.codecs:
        name, lines = "speaking-codecs", codecs(work, options.phrases)
    else:
        models = [options.only] if options.only else list(CONFIGS)
        name, (lines, worst) = "speaking", compare(work, options.minutes, options.phrases, models)
    from importlib.metadata import version

    others = [f"{package} {version(package)}" for package in ("pocketsphinx", "espeakng-loader", "jiwer")]
    lines += ["", measured_at(f"python tools/parity/speaking.py{' --codecs' * options.codecs}", others)]
    print("\n".join(lines))
    if options.write:
        BENCHMARKS.write_text(with_table(name, "\n".join(lines), BENCHMARKS), encoding="utf-8")
    return int(worst > MAY_GROW)


if __name__ == "__main__":
    sys.exit(main())
