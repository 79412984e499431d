"""Learning from rewards on the quickstart's additions: SFT that is stopped early, then GRPO with several seeds.

    python tools/quickstart/grpo.py [--seeds 42 43 44] [--output output/quickstart]

1. SFT of the tiny ERNIE is stopped after 2,100 of its 2,864 steps; the first of its checkpoints that gets at least 60%
   of the held-out additions (`grpo-eval.jsonl`) right becomes `sft-early`.
2. `grpo.yaml` goes on from there, once for each seed, with the reward `exact_match` on additions alone.
3. Both are compared: exact match of 400 additions that neither training nor any choice has seen, and of the other kinds
   of questions (`sft-eval.jsonl`), before and after, with the time that each run took.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from make_data import unseen_additions
from score import score

from erniekit.environment import import_paddle

ROOT = Path(__file__).parents[2]
SFT, GRPO = (f"examples/configs/quickstart/{name}.yaml" for name in ("sft", "grpo"))
ADDITIONS, OTHERS = (Path(f"examples/data/{name}-eval.jsonl") for name in ("grpo", "sft"))
STOP, FIRST, EVERY = 2100, 1500, 50  # steps of SFT: where it stops, and which checkpoints are looked at
FEWEST_RIGHT = 0.6
UNSEEN = 400


def train(config: str, *words: str, quit_at: int = 0) -> float:
    """Run a training; return the seconds that it took.

    Args:
        quit_at: it is told to stop after this step; 0: it goes on to its end.
    """
    started = time.monotonic()
    print(f"$ erniekit train {config} {' '.join(words)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "erniekit", "train", config, *words])
    folder = Path(next(word.partition("=")[2] for word in words if word.startswith("output_dir=")))
    while quit_at and process.poll() is None:
        if (folder / "training_log.jsonl").exists():
            (folder / "control").write_text(f"quit@{quit_at}\n", encoding="utf-8")
            break
        time.sleep(0.5)
    if process.wait():
        sys.exit(process.returncode)
    return time.monotonic() - started


def right(model: Path, additions: Path) -> float:
    """Return the share of additions that a model answers exactly."""
    (found, asked), *_ = score(model, additions, random_weights=False).values()
    return found / asked


def right_others(model: Path) -> float:
    """Return the share of questions of the other kinds that a model answers exactly."""
    counts = [each for task, each in score(model, OTHERS, random_weights=False).items() if task != "addition"]
    return sum(found for found, _ in counts) / sum(asked for _, asked in counts)


def stopped_early(output: Path) -> Path:
    """Train until the model knows most additions, and return its folder; one that is there already is taken."""
    chosen = output / "sft-early"
    if (chosen / "config.json").is_file():
        return chosen
    run = output / "sft-early-run"
    saves = (f"save_steps={EVERY}", f"save_total_limit={(STOP - FIRST) // EVERY + 1}", "ignore_save_lr_and_optim=true")
    train(SFT, f"output_dir={run}", "do_eval=false", "report_to=none", *saves, quit_at=STOP)
    for step in range(FIRST, STOP + 1, EVERY):
        found = right(run / f"checkpoint-{step}", ADDITIONS)
        print(f"  after {step} steps: {found:.1%} of the additions are right", flush=True)
        if found >= FEWEST_RIGHT:
            shutil.copytree(run / f"checkpoint-{step}", chosen)
            return chosen
    sys.exit(f"no checkpoint of {run} gets {FEWEST_RIGHT:.0%} of the additions right; train it for longer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--output", type=Path, default=Path("output/quickstart"))
    arguments = parser.parse_args()
    os.chdir(ROOT)
    import_paddle()
    start = stopped_early(arguments.output)
    unseen = arguments.output / "unseen-additions.jsonl"
    unseen.write_text("".join(json.dumps(record) + "\n" for record in unseen_additions(UNSEEN)), encoding="utf-8")
    before = (right(start, unseen), right_others(start))
    rows = [("before", *before, 0.0)]
    for seed in arguments.seeds:
        folder = arguments.output / ("grpo" if seed == arguments.seeds[0] else f"grpo-{seed}")
        seconds = train(GRPO, f"model_name_or_path={start}", f"output_dir={folder}", f"seed={seed}")
        rows.append((f"seed {seed}", right(folder, unseen), right_others(folder), seconds))
    print(f"\n{'':<10}{'additions':>12}{'others':>12}{'seconds':>10}")
    for name, added, others, seconds in rows:
        print(f"{name:<10}{added:>12.1%}{others:>12.1%}{seconds:>10.0f}")
    gains = [added - before[0] for _, added, *_ in rows[1:]]
    lost = [before[1] - others for _, _, others, _ in rows[1:]]
    print(f"\nadditions: {100 * min(gains):+.1f} points at least; others: {-100 * max(lost):+.1f} at worst")
    print(f"erniekit plot {arguments.output / 'grpo'} --figures reward,completion_len,kl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
