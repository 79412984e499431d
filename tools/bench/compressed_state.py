"""What compressed moments change (`ckpt_quant_stage`): the run that goes on from them, and what saving costs.

    python tools/bench/compressed_state.py [--at 50 400] [--steps 30] [--layers 12] [--hidden 768] [--write]

Trains the quickstart with a constant learning rate, saves after `--at` steps, and goes on for `--steps` more: exactly,
and from the same checkpoint with its moments put through each representation. So losses of the same batches are
compared. Other representations than those of `ckpt_quant_stage` are computed here, for comparison only. Then saves and
loads the AdamW of a larger random model. Prints two markdown tables; `--write` puts them into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.marked import with_table
from tools.bench.memory import Peak

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples/configs/quickstart/sft.yaml"
EPSILON = 1e-8
Moments = tuple[np.ndarray, np.ndarray, float]  # both moments as they come back, and bytes a value for the two


class Representation(NamedTuple):
    """One way to store moments; `again`: every so many steps, instead of once."""

    name: str
    of: Callable[[np.ndarray, np.ndarray], Moments]
    again: int = 0


def ours(stage: str, moment1: np.ndarray, moment2: np.ndarray) -> Moments:
    from erniekit.training.checkpoint.quantized_state import (
        FORMATS,
        decode_first,
        decode_second,
        encode_first,
        encode_second,
    )

    form = FORMATS[stage]
    roots = encode_second(moment2, form)
    steps = encode_first(moment1, roots, form)
    size = roots.codes.nbytes + steps.codes.nbytes + 2 * (roots.low.size + roots.high.size + steps.scale.size)
    second, first = decode_second(roots, moment2.shape, form), decode_first(steps, roots, moment1.shape, form)
    return first, second, size / moment1.size


def linear_blocks(moment1: np.ndarray, moment2: np.ndarray) -> Moments:
    """Moment and root, each in whole numbers of a scale for 128 values."""

    def rounded(values: np.ndarray, levels: int) -> np.ndarray:
        grouped = np.pad(values.reshape(-1), (0, -values.size % 128)).reshape(-1, 128)
        scale = np.abs(grouped).max(axis=1, keepdims=True) / levels
        return (
            (np.rint(grouped / np.where(scale > 0, scale, 1)) * scale).reshape(-1)[: values.size].reshape(values.shape)
        )

    return rounded(moment1, 127), rounded(np.sqrt(moment2), 255) ** 2, 2 + 8 / 128


def linear_inverse(axis_groups: int, bits: int, moment1: np.ndarray, moment2: np.ndarray) -> Moments:
    """Moment in whole numbers of a scale, and 1 / (root + epsilon) in equal steps of its range, both along the first
    axis of a matrix: all of it, or groups."""
    rows = moment1.shape[0]
    group = rows if rows % (axis_groups or rows) else axis_groups or rows
    inverse = 1 / (np.sqrt(moment2) + EPSILON)
    grouped, parts = moment1.reshape(-1, group, *moment1.shape[1:]), inverse.reshape(-1, group, *moment1.shape[1:])
    scale = np.abs(grouped).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    first = np.rint(grouped / np.where(scale > 0, scale, 1)) * scale
    low, high = parts.min(axis=1, keepdims=True), parts.max(axis=1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    second = (1 / (np.rint((parts - low) / np.where(step > 0, step, 1)) * step + low) - EPSILON) ** 2
    shape = moment1.shape
    return first.reshape(shape), second.reshape(shape), 2 * bits / 8 + 12 / group


def shaken(moment1: np.ndarray, moment2: np.ndarray) -> Moments:
    """Both off by a ten-thousandth at random, for what any small difference grows to."""
    random = np.random.default_rng(moment1.size)
    first, second = (
        values * (1 + 1e-4 * random.standard_normal(values.shape).astype(np.float32)) for values in (moment1, moment2)
    )
    return first, second, 8.0


def forgotten(moment1: np.ndarray, moment2: np.ndarray) -> Moments:
    return np.zeros_like(moment1), np.zeros_like(moment2), 0.0


REPRESENTATIONS = [
    Representation("`O1`", partial(ours, "O1")),
    Representation("`O1`, three times, each after 10 steps", partial(ours, "O1"), again=10),
    Representation("8 bits: m per column, 1 / root per column, in equal steps", partial(linear_inverse, 0, 8)),
    Representation("8 bits: m and root, in equal steps of 128 values", linear_blocks),
    Representation("`O2`", partial(ours, "O2")),
    Representation("`O2`, three times, each after 10 steps", partial(ours, "O2"), again=10),
    Representation("4 bits: m and 1 / root, in equal steps of 32 values", partial(linear_inverse, 32, 4)),
    Representation("float32, each off by 0.0001 of itself at random", shaken),
    Representation("fresh moments (`ignore_load_lr_and_optim`)", forgotten),
]


def train(folder: Path, steps: int, save_steps: int, start: Path | None = None) -> list[float]:
    """Losses of the quickstart's steps from `start` on, or from the beginning."""
    from erniekit.config import Config
    from erniekit.runners.train import run_training

    values = {
        "output_dir": folder,
        "max_steps": steps,
        "lr_scheduler_type": "constant_with_warmup",
        "do_eval": "false",
        "logging_steps": 1,
        "save_steps": save_steps,
        "save_total_limit": 1000,
        "report_to": "none",
        "disable_tqdm": "true",
        **({"resume_from_checkpoint": start} if start else {}),
    }
    config = Config.load(QUICKSTART, [f"{name}={value}" for name, value in values.items()])
    with contextlib.redirect_stdout(io.StringIO()):
        run_training(config)
    log = (folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["loss"] for record in map(json.loads, log) if "loss" in record]


def put_through(checkpoint: Path, target: Path, of: Callable[[np.ndarray, np.ndarray], Moments]) -> dict[str, float]:
    """Copy a checkpoint with the moments of its matrices stored another way; how far they are off."""
    from erniekit.manifest import MANIFEST
    from erniekit.model.storage.safetensors import SafetensorsFile, write_safetensors
    from erniekit.training.checkpoint.atomic_folder import write_folder

    file = SafetensorsFile(checkpoint / "optimizer.safetensors")
    state = {name: file.read(name) for name in file.names()}
    squares, size, values, worst = np.zeros(4), 0.0, 0, 0.0
    for name in [name.removesuffix("/moment1") for name in state if name.endswith("/moment1")]:
        first, second = state[f"{name}/moment1"], state[f"{name}/moment2"]
        if first.ndim < 2:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            back1, back2, bytes_a_value = of(first, second)
        update, back = first / (np.sqrt(second) + EPSILON), back1 / (np.sqrt(back2) + EPSILON)
        pairs = ((back1 - first, first), (back - update, update))
        squares += [float(np.square(part, dtype=np.float64).sum()) for pair in pairs for part in pair]
        worst = max(worst, float(np.abs(back - update).max()))
        size, values = size + bytes_a_value * first.size, values + first.size
        state[f"{name}/moment1"], state[f"{name}/moment2"] = back1.astype(np.float32), back2.astype(np.float32)

    def write(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.name not in (MANIFEST, "optimizer.safetensors"):
                shutil.copyfile(path, folder / path.name)
        shapes = {name: tensor.shape for name, tensor in state.items()}
        write_safetensors(folder / "optimizer.safetensors", shapes, state.items())

    write_folder(target, write)
    moment, update = np.sqrt(squares[0] / squares[1]), np.sqrt(squares[2] / squares[3])
    return {"bytes": size / values, "moment": moment, "update": update, "worst": worst}


def continued(whole: Path, at: int, steps: int, representation: Representation, folder: Path) -> dict[str, Any]:
    """How far off the moments are, and the losses of the steps that follow."""
    found: dict[str, float] = {}
    source, step, losses = whole / f"checkpoint-{at}", at, []
    while step < at + steps:
        stop = min(at + steps, step + (representation.again or steps))
        start = folder / f"start/checkpoint-{step}"
        errors = put_through(source, start, representation.of)
        found = found or errors
        losses += train(folder / f"run-{step}", stop, stop - step, start)
        source, step = folder / f"run-{step}/checkpoint-{stop}", stop
    shutil.rmtree(folder)
    return {**found, "losses": losses}


def table_of_losses(at: list[int], steps: int) -> Iterator[str]:
    columns = ("at step", "moments of matrices", "bytes a value", "error of m", "of the update", "largest")
    yield f"| {' | '.join(columns)} | loss of {steps} steps, mean difference | largest |"
    yield "|---:|---|---:|---:|---:|---:|---:|---:|"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = train(folder / "whole", max(at) + steps, at[0])
        for resume_step in at:
            exact = np.array(losses[resume_step : resume_step + steps])
            for representation in REPRESENTATIONS:
                got = continued(folder / "whole", resume_step, steps, representation, folder / "other")
                away = np.array(got["losses"]) - exact
                yield (
                    f"| {resume_step} | {representation.name} | {got['bytes']:.2f} | {got['moment']:.1e} "
                    f"| {got['update']:.1e} | {got['worst']:.2g} | {away.mean():+.1e} | {np.abs(away).max():.1e} |"
                )
            yield f"| {resume_step} | exact: loss {exact[0]:.3f} to {exact[-1]:.3f} | 8 | 0 | 0 | 0 | 0 | 0 |"


def table_of_costs(layers: int, hidden: int) -> Iterator[str]:
    from erniekit.environment import cpu_settings, import_paddle, package_versions

    import_paddle()
    import paddle

    from erniekit.config.sections.training import TrainingParameters
    from erniekit.model import builder
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.weights import named_weights
    from erniekit.training.checkpoint.quantized_state import FORMATS
    from erniekit.training.checkpoint.resume import RunIdentity
    from erniekit.training.checkpoint.state import TrainerState, load_optimizer, save_checkpoint
    from erniekit.training.optim.adamw import build_optimizer, optimizer_state

    builder.keep_freed_memory = lambda: False  # so that what is freed leaves the process
    config = ModelConfig.from_json(
        {
            "model_type": "ernie4_5",
            "vocab_size": 16384,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "head_dim": 64,
            "tie_word_embeddings": True,
        }
    )
    parameters = named_weights(builder.build_model(config, None, seed=0))
    optimizer = build_optimizer(parameters, TrainingParameters())
    state = optimizer_state(optimizer, parameters)
    for name, tensor in state.items():
        if name.endswith("moment1"):
            gradient = paddle.randn(tensor.shape)
            tensor.set_value(0.1 * gradient)
            state[name.replace("moment1", "moment2")].set_value(0.001 * gradient * gradient)
    largest = 4e-6 * max(tensor.size for tensor in state.values())
    identity = RunIdentity(0, "", {}, cpu_settings(), package_versions())
    yield (
        f"AdamW of {config.parameter_count() / 1e6:.0f} M parameters; a moment of its largest matrix takes "
        f"{largest:.0f} MB.\n"
    )
    yield "| `ckpt_quant_stage` | optimizer's file, MB | saved, CPU s | loaded, CPU s | memory beside training, MB |"
    yield "|---|---:|---:|---:|---:|"
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("O0", "O1", "O2"):
            form, peak, begun = FORMATS.get(stage), Peak(), time.process_time()
            peak.start()
            checkpoint = save_checkpoint(
                Path(folder) / stage,
                TrainerState(),
                identity=identity,
                resolved_config={},
                write_model=lambda target: None,
                optimizer=optimizer,
                parameters=parameters,
                moments=form,
            )
            saved = time.process_time() - begun
            assert load_optimizer(checkpoint, optimizer, parameters) == form
            loaded, memory = time.process_time() - begun - saved, peak.stop()[0] * 1.048576
            size = sum(path.stat().st_size for path in checkpoint.glob("optimizer*")) / 1e6
            yield f"| `{stage}` | {size:,.0f} | {saved:.1f} | {loaded:.1f} | {memory:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at", type=int, nargs="+", default=[50, 400], help="multiples of the first")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    from erniekit.environment import import_paddle

    import_paddle()
    lines: list[str] = []
    for line in (*table_of_costs(options.layers, options.hidden), "", *table_of_losses(options.at, options.steps)):
        print(line, flush=True)
        lines.append(line)
    if options.write:
        document = ROOT / "docs/benchmarks.md"
        document.write_text(with_table("compressed-state", "\n".join(lines), document), encoding="utf-8")


if __name__ == "__main__":
    main()
