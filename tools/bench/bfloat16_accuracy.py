"""What bfloat16 products on a CPU (`bf16: true`) change: losses and answers' scores of the quickstart, and preferences.

    python tools/bench/bfloat16_accuracy.py [--seeds 42 7 1] [--steps N] [--preference-steps N] [--write]

Trains examples/configs/quickstart/sft.yaml with each seed in float32, in bfloat16 and in bfloat16 at level O2, and
dpo.yaml from the first model in float32, with bfloat16 in all products but the head's, and in all. Without `--steps`
the runs are as long as their files say. It then computes the rewards of the held-out pairs by the policy that float32
has trained in each precision: their difference from float32, beside their spread, is what rounding adds to a
preference. Prints two tables; `--write` puts them and a plot of the losses into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from marked import BENCHMARKS, ROOT, measured_at, with_table
from plots import new_plot, save_plot

SFT, DPO = (ROOT / f"examples/configs/quickstart/{name}.yaml" for name in ("sft", "dpo"))
BF16 = {"bf16": "true", "cpu_bf16": "always"}
SUPERVISED = {"float32": {}, "bfloat16": BF16, "bfloat16, O2": {**BF16, "fp16_opt_level": "O2"}}
PREFERENCES = {
    "float32": {},
    "bfloat16, head in float32": BF16,
    "bfloat16, head, too": {**BF16, "amp_custom_white_list": "softmax_with_cross_entropy"},
}
Log = list[dict[str, Any]]


def train(config_file: Path, folder: Path, **values: Any) -> Log:
    """Train, and return the lines of the training log."""
    from erniekit.config import Config
    from erniekit.runners.train import run_training

    values = {"output_dir": folder, "save_strategy": "no", "report_to": "none", "disable_tqdm": "true"} | values
    config = Config.load(config_file, [f"{name}={value}" for name, value in values.items()])
    with contextlib.redirect_stdout(io.StringIO()):
        run_training(config)
    log = (folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    return list(map(json.loads, log))


def losses(log: Log) -> tuple[list[int], list[float]]:
    points = [(line["step"], line["loss"]) for line in log if "loss" in line]
    return [step for step, _ in points], [loss for _, loss in points]


def last(log: Log, metric: str) -> float:
    return float([line for line in log if metric in line][-1][metric])


def supervised(folder: Path, seeds: list[int], length: dict[str, Any]) -> tuple[list[str], dict[tuple[str, int], Log]]:
    """Rows of a Markdown table, and the logs by precision and seed."""
    logs = {}
    rows = [
        "| seed | precision | evaluation loss | accuracy, % | largest difference of a loss |",
        "|---|---|---:|---:|---:|",
    ]
    for seed in seeds:
        for name, precision in SUPERVISED.items():
            log = train(SFT, folder / f"sft-{seed}-{name}", seed=seed, **precision, **length)
            logs[name, seed] = log
            apart = np.abs(np.subtract(losses(log)[1], losses(logs["float32", seed])[1])).max()
            difference = f"{apart:.4f}" if precision else ""
            accuracy = 100 * last(log, "eval_token_accuracy")
            rows.append(f"| {seed} | {name} | {last(log, 'eval_loss'):.4f} | {accuracy:.2f} | {difference} |")
            print(rows[-1], flush=True)
    return rows, logs


def preferences(folder: Path, model: Path, length: dict[str, Any]) -> list[str]:
    """Rows of a Markdown table."""
    rows = [
        "| precision | preference loss | reward accuracy, % | reward margin | error of a margin by rounding, "
        "of the spread of margins |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, precision in PREFERENCES.items():
        log = train(DPO, folder / f"dpo-{name}", model_name_or_path=model, **precision, **length)
        error = margin_error(model, folder / "dpo-float32", precision) if precision else ""
        figures = (last(log, "eval_preference_loss"), last(log, "eval_reward_margin"))
        accuracy = 100 * last(log, "eval_reward_accuracy")
        rows.append(f"| {name} | {figures[0]:.4f} | {accuracy:.2f} | {figures[1]:.4f} | {error} |")
        print(rows[-1], flush=True)
    return rows


def margin_error(reference: Path, policy: Path, precision: dict[str, str]) -> str:
    """The root mean square of what this precision adds to the margins of held-out pairs, as a share of their standard
    deviation in float32."""
    exact, rounded = (margins(reference, policy, settings) for settings in ({}, precision))
    return f"{100 * np.sqrt(np.square(rounded - exact).mean()) / exact.std():.2f}%"


def margins(reference: Path, policy: Path, precision: dict[str, str]) -> np.ndarray:
    """Of each held-out pair: how much more than the reference the policy prefers the chosen answer, in natural
    logarithms."""
    ours, theirs = (pair_log_probabilities(model, precision) for model in (policy, reference))
    ratios = ours - theirs
    return np.asarray(ratios[:, 0] - ratios[:, 1])


def pair_log_probabilities(model_folder: Path, precision: dict[str, str]) -> np.ndarray:
    """Log-probabilities of the answers of the held-out pairs, [pairs, 2], chosen ones first."""
    import paddle

    from erniekit.build.data import evaluation_dataset, evaluation_plan
    from erniekit.build.model import begin, initial_weights, open_model
    from erniekit.config import Config
    from erniekit.training.collectives import SINGLE_PROCESS
    from erniekit.training.objectives.preference import answer_log_probabilities

    values = {"model_name_or_path": model_folder, **precision}
    config = Config.load(DPO, [f"{name}={value}" for name, value in values.items()])
    _, tokenizer, template = begin(config, writes_output=False)
    plan = evaluation_plan(config, evaluation_dataset(config, tokenizer, template))
    model = open_model(config, initial_weights(config))
    model.eval()
    batches = [batch for step in range(plan.steps_in_epoch(0)) for batch in plan.micro_batches(step)]
    with paddle.no_grad():
        found = SINGLE_PROCESS.forward_only(model, answer_log_probabilities(fused_head=True), batches)
    return np.concatenate([np.stack([of["chosen"], of["rejected"]], 1) for of in found])


def plot(logs: dict[tuple[str, int], Log]) -> str:
    figure, axes = new_plot()
    styles = {"float32": "-", "bfloat16": "--", "bfloat16, O2": ":"}
    for (name, seed), log in logs.items():
        axes.plot(*losses(log), styles[name], label=f"{name}, seed {seed}", linewidth=1.2)
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.legend(fontsize=8)
    return save_plot(figure, "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 7, 1])
    parser.add_argument("--steps", type=int, help="of a run of SFT (default: as its file says)")
    parser.add_argument("--preference-steps", type=int, help="of a run of DPO (default: as its file says)")
    parser.add_argument("--write", action="store_true", help="write the tables and the plot into docs/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, logs = supervised(Path(folder), options.seeds, _length(options.steps))
        model = Path(folder) / f"sft-{options.seeds[0]}-float32"
        others = preferences(Path(folder), model, _length(options.preference_steps))
    tables = "\n".join([*rows, "", *others])
    print(tables)
    if options.write:
        path = plot(logs)
        command = "python tools/bench/bfloat16_accuracy.py"
        text = f"{tables}\n\n![losses of each precision]({path})\n\n{measured_at(command)}"
        BENCHMARKS.write_text(with_table("bfloat16", text, BENCHMARKS), encoding="utf-8")


def _length(steps: int | None) -> dict[str, Any]:
    return {"max_steps": steps, "eval_steps": steps, "logging_steps": 10} if steps else {"logging_steps": 10}


if __name__ == "__main__":
    main()
