"""How fast models speak: seconds of sound a second, the wait for the first, memory; beside the package `omnivoice`.

    python tools/bench/speaking.py [--models tiny small] [--tasks one batch long] [--rounds 3] [--threads 2]
        [--cpu] [--omnivoice .venv-transformers5/bin/python] [--write]

Masked codes: a Qwen3 of speaking_case.py with random weights, 8 levels of 1,024 codes, 25 frames a second as OmniVoice
has them; 16 steps with guidance, the likeliest codes, float32. Both sides read the same folder, divide long texts and
estimate durations by themselves, and take turns in processes of their own; before anything is timed, all codes of a
sentence must be the same, and the texts of the task equally long: among many thousand codes two may be equally likely
but for rounding, and what follows is another text then. Codes are timed, and no sound is made.
AR and NAR: a Llama of the same size with the same tables speaks 4 seconds of each piece; ours alone, as no package has
this model. With --cpu seconds are the processor's, for a machine that others use, too; then take --threads 1. `make
bench-speaking` installs the package. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from product_rates import in_words, product_rates
from rounds import counted
from speaking_case import CODES, LEVELS, MODELS, TASKS, llm_config
from tokenizers import Tokenizer
from workers import Worker, make_model

sys.path.insert(0, str(ROOT))
from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig
from erniekit.codecs.spectrogram import MelFrames
from erniekit.model.architectures.speaking import OMNIVOICE, VALL_E, control_tokens

SIDES = Path(__file__).resolve().parent / "sides"
TOKENIZER = ROOT / "examples/models/tiny-speaker"
FRAMES = MelFrames(24_000, 2048, 960, 80, 40.0, 12_000.0)  # 25 a second
KINDS = {"masked codes": (OMNIVOICE, "qwen3"), "AR and NAR": (VALL_E, "llama")}
HEADER = """\
| objective | model | task | ours, s of sound/s | omnivoice, s of sound/s | ratio | first sound, ms: ours / omnivoice | peak MB: ours / omnivoice |
|---|---|---|---:|---:|---|---|---|"""  # noqa: E501


def write_folder(folder: Path, kind: str, llm: str, model: str) -> None:
    """Write a model with random weights, its tokenizer and a codec of the frame rate, which nobody opens."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tokenizer.add_special_tokens(list(control_tokens(kind, LEVELS)))
    masked = {"audio_vocab_size": CODES + 1, "audio_mask_id": CODES, "audio_codebook_weights": [8, 8, 6, 6, 4, 4, 2, 2]}
    values: dict[str, Any] = masked if kind == OMNIVOICE else {"audio_vocab_size": CODES}
    values |= {"model_type": kind, "num_audio_codebook": LEVELS}
    make_model(folder, values | {"llm_config": llm_config(model, llm)})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes((TOKENIZER / "tokenizer_config.json").read_bytes())
    config = ResidualKMeansConfig(FRAMES, levels=LEVELS, codebook_size=CODES)
    codebooks = np.zeros((LEVELS, CODES, FRAMES.mel_bins), np.float32)
    (folder / "audio_tokenizer").mkdir()
    ResidualKMeans(config, np.zeros(FRAMES.mel_bins, np.float32), codebooks).save(folder / "audio_tokenizer")


def codes_of(folder: Path, task: str, side: Worker) -> list[np.ndarray]:
    """Let a side speak, and return the codes int64 [C, T] of each text."""
    path = folder / "codes.npz"
    side.run(task=task, answers=str(path), clock="perf_counter")
    with np.load(path) as saved:
        return [saved[key] for key in saved.files]


def compare(folder: Path, task: str, sides: dict[str, Worker]) -> None:
    """Let each side speak a sentence and the task, and exit where they differ: in a code of the sentence, or in the
    length of a text of the task."""
    sentences = [codes_of(folder, "one", side)[0] for side in sides.values()]
    shapes = [[codes.shape for codes in codes_of(folder, task, side)] for side in sides.values()]
    for sentence, own in zip(sentences, shapes, strict=True):
        if own != shapes[0] or sentence.shape != sentences[0].shape:
            raise SystemExit(f"{task}: the sides speak codes of other shapes: {own} and {shapes[0]}")
        if different := int((sentence != sentences[0]).sum()):
            raise SystemExit(f"{task}: the sides differ in {different:,} of {sentence.size:,} codes of a sentence")


def row(words: str, model: str, task: str, rounds: dict[str, list[dict[str, float]]]) -> str:
    """A row of the table; a ratio is that of the same round."""
    rates = {name: [each["audio"] / each["seconds"] for each in own] for name, own in rounds.items()}
    firsts = {name: 1e3 * statistics.median(each["first"] for each in own) for name, own in rounds.items()}
    medians = [f"{statistics.median(own):,.1f}" for own in rates.values()]
    if "omnivoice" in rates:
        ratios = [mine / other for mine, other in zip(rates["ours"], rates["omnivoice"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    else:
        medians, spread = [*medians, "-"], "-"
    first = " / ".join(f"{each:,.0f}" for each in firsts.values())
    peak = " / ".join(f"{own[-1]['peak_mb']:,.0f}" for own in rounds.values())
    return f"| {words} | {model} | {TASKS[task].words} | {' | '.join(medians)} | {spread} | {first} | {peak} |"


def measure(words: str, model: str, options: argparse.Namespace) -> list[str]:
    """The rows of a model."""
    kind, llm = KINDS[words]
    rows = []
    for task in options.tasks:  # processes of their own, so that a peak is that of the task
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "model").mkdir()
            write_folder(folder / "model", kind, llm, model)
            programs = {"ours": (sys.executable, "speaking_ours.py")}
            if kind == OMNIVOICE and options.omnivoice.exists():
                programs["omnivoice"] = (str(options.omnivoice), "speaking_theirs.py")
            sides = {}
            for name, (python, script) in programs.items():
                sides[name] = Worker([python, str(SIDES / script), str(folder / "model")], options.threads)
                stack.callback(sides[name].close)
            compare(folder, task, sides)
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for _ in counted(range(options.rounds), words):
                for name, side in sides.items():
                    rounds[name].append(side.run(task=task, clock="process_time" if options.cpu else "perf_counter"))
        rows.append(row(words, model, task, rounds))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--objectives", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="processor time in place of wall time")
    parser.add_argument(
        "--omnivoice", type=Path, default=ROOT / ".venv-transformers5/bin/python", help="a Python that has the package"
    )
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    lines = [HEADER]
    print(HEADER, flush=True)
    for words in options.objectives:
        for model in options.models:
            lines += measure(words, model, options)
    rates = [f"paddle {in_words(product_rates(sys.executable, 'paddle'))}"]
    others: list[str] = []
    if options.omnivoice.exists():
        rates.append(f"torch {in_words(product_rates(options.omnivoice, 'torch'))}")
        others = versions_in(options.omnivoice, "omnivoice", "torch", "transformers")
    clock = ", processor time" if options.cpu else ""
    below = f"{options.threads} threads, {options.rounds} rounds{clock}. Product rates after them: {'; '.join(rates)}."
    lines += ["", f"{below} {measured_at('python tools/bench/speaking.py --write', others)}"]
    print("\n".join(lines[-2:]))
    if options.write:
        BENCHMARKS.write_text(with_table("speaking-speed", "\n".join(lines), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
