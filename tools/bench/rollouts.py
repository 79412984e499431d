"""Learning from one's own answers (stage GRPO) beside trl's GRPOTrainer: tokens sampled a second, seconds of a step.

    tools/bench/peers/make.sh .peers torch      # once
    python tools/bench/rollouts.py [--models quickstart tiny small] [--answers 64] [--group 8] [--longest 128]
                                   [--steps 2] [--rounds 3] [--threads 2] [--environments .peers] [--write]

"quickstart" has the shape of examples/models/tiny-ernie, the others are those of workload.py. Both sides get the same
random weights, the quickstart's prompts and tokenizer, one reward in Python, and make whole steps: sample `answers`
answers of at most `longest` tokens in groups, score them, one update by the loss `grpo` without a reference. They take
turns, each in a process of its own; a ratio is that of the same round, its median and range. Of trl the faster way to
generate counts, with or without transformers' continuous batching. Random answers end by chance, so both sides are
asked for the same number of answers but write as many tokens only on average: rates are per token that was really
sampled, and the table tells the mean lengths. The mean reward of both must agree within 0.05.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import workload
from marked import BENCHMARKS, ROOT, measured_at, versions_in, with_table
from product_rates import in_words, product_rates
from rounds import counted
from workers import SideEndedError, Worker, make_model

SIDES = Path(__file__).resolve().parent / "sides"
TOKENIZER, PROMPTS = ROOT / "examples/models/tiny-ernie", ROOT / "examples/data/grpo-train.jsonl"
CONFIG = ROOT / "examples/configs/quickstart/grpo.yaml"
MODELS = {"quickstart": json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))} | workload.MODELS
VOCABULARY = 512  # of the tokenizer
WAYS = {"trl": (), "trl, continuous batching": ("--continuous",)}
Answer = dict[str, Any]


def prepare(folder: Path, model: str) -> None:
    """Write the model with the quickstart's tokenizer, and the prompts as trl reads them, in our template."""
    make_model(folder, MODELS[model] | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for line in PROMPTS.read_text(encoding="utf-8").splitlines():
            prompt = f"<|begin_of_sentence|>User: {json.loads(line)['src'][0]}\nAssistant: "
            file.write(json.dumps({"prompt": prompt}) + "\n")


def start_ours(folder: Path, options: argparse.Namespace) -> Worker:
    words = {
        "model_name_or_path": folder, "output_dir": folder / "ours", "train_dataset_path": PROMPTS, "do_eval": "false",
        "rewards": f"python:{SIDES / 'rollouts_reward.py'}:letters", "num_generations": options.group, "beta": 0.0,
        "max_completion_len": options.longest, "max_seq_len": 1024, "max_steps": 100_000,
        "per_device_train_batch_size": options.answers, "dynamic_sampling": "false", "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.01, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": "true",
    }  # fmt: skip
    overrides = [f"{name}={value}" for name, value in words.items()]
    return Worker([sys.executable, str(SIDES / "rollouts_ours.py"), str(CONFIG), *overrides], options.threads)


def start_theirs(folder: Path, options: argparse.Namespace, more: tuple[str, ...]) -> Worker:
    python = options.environments / "torch/bin/python"
    sizes = {"threads": options.threads, "answers": options.answers, "group": options.group, "longest": options.longest}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    where = ["--folder", str(folder), "--output", str(folder / "theirs")]
    return Worker([str(python), str(SIDES / "rollouts_trl.py"), *where, *words, *more], options.threads)


def measure(model: str, options: argparse.Namespace) -> dict[str, list[tuple[Answer, Answer]]]:
    """The turns of ours and of each way of trl, side by side."""
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, model)
        ours = start_ours(folder, options)
        ours.run(steps=1)
        for way, more in WAYS.items():
            theirs = start_theirs(folder, options, more)
            try:
                theirs.run(steps=1)
                turns = [
                    (ours.run(steps=options.steps), theirs.run(steps=options.steps))
                    for _ in counted(range(options.rounds), f"{model}, {way}")
                ]
            except SideEndedError as ended:
                print(f"{way} could not run {model}:\n{ended}", file=sys.stderr)
                continue
            finally:
                theirs.close()
            rewards = [statistics.mean(answer["losses"][0] for answer in side) for side in zip(*turns, strict=True)]
            if abs(rewards[0] - rewards[1]) > 0.05:
                raise SystemExit(f"{model}: the mean rewards differ: {rewards[0]:.3f} here, {rewards[1]:.3f} of {way}")
            found[way] = turns
        ours.close()
    return found


def sampled_rate(answer: Answer) -> float:
    return answer["tokens"] / answer["sampling"]


def whole_rate(answer: Answer) -> float:
    return answer["tokens"] / answer["seconds"]


def rows(model: str, found: dict[str, list[tuple[Answer, Answer]]], steps: int) -> list[str]:
    """The table's lines of a model: ours, and the faster way of trl with the ratios."""
    way = max(found, key=lambda name: statistics.median(whole_rate(theirs) for _, theirs in found[name]))
    turns = found[way]

    def line(name: str, side: int, ratios: str) -> str:
        own = [turn[side] for turn in turns]
        median = {
            name: statistics.median(value(answer) for answer in own)
            for name, value in {
                "sampled": sampled_rate,
                "seconds": lambda answer: answer["seconds"] / steps,
                "share": lambda answer: answer["sampling"] / answer["seconds"],
                "length": lambda answer: answer["tokens"] / answer["answers"],
            }.items()
        }
        return (
            f"| {model} | {name} | {median['sampled']:,.0f} | {median['seconds']:.2f} | {median['share']:.0%} "
            f"| {ratios} | {median['length']:.0f} | {own[-1]['peak_mb']:,.0f} |"
        )

    def ratio(value: Any) -> str:
        each = [value(ours) / value(theirs) for ours, theirs in turns]
        return f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"

    return [line("ours", 0, " | "), line(way, 1, f"{ratio(sampled_rate)} | {ratio(whole_rate)}")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("quickstart", "tiny", "small"), default=["quickstart", "tiny"])
    parser.add_argument("--answers", type=int, default=64, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--longest", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where peers/make.sh has put them")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    torch = options.environments / "torch/bin/python"
    if not torch.exists():
        raise SystemExit(f"{torch} is not there; tools/bench/peers/make.sh {options.environments} torch makes it")
    lines = [
        f"{options.answers} answers of at most {options.longest} tokens a step, groups of {options.group}, "
        f"{options.threads} threads; medians of {options.rounds} turns of {options.steps} steps.",
        "",
        "| model | side | tokens sampled a second | seconds of a step | share of sampling "
        "| ours, times theirs: sampling | whole steps, per token | mean length | peak, MB |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rates = []
    for model in options.models:
        counts = (options.threads,)
        rates.append(f"paddle {in_words(product_rates(sys.executable, 'paddle', counts))}")
        rates.append(f"torch {in_words(product_rates(torch, 'torch', counts))}")
        if found := measure(model, options):
            lines += rows(model, found, options.steps)
            print("\n".join(lines[-2:]), flush=True)
    others = versions_in(torch, "torch", "transformers", "trl")
    lines += ["", f"Products: {'; '.join(rates)}.", "", measured_at("python tools/bench/rollouts.py --write", others)]
    print("\n".join(lines))
    if options.write:
        BENCHMARKS.write_text(with_table("rollouts", "\n".join(lines), BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
