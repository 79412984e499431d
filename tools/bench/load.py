"""What loading a model costs: seconds and the peak of memory, for files of several types and layouts.

    python tools/bench/load.py [--layers 18] [--hidden 1024] [--vocabulary 103424] [--repeats 5]
                               [--environments .peers] [--folder /tmp/bench-load] [--write]

Writes random weights with ERNIE-4.5-0.3B's shapes (361 M parameters) as float32, bfloat16 and float32 shards, and loads
each as float32, in a process of its own and in turn with transformers where the environment of training_speed.py is
there. Loaded is a model when the largest value of every weight has been found, because a mapped file is only read then;
both sides must find the same. The peak is the kernel's VmHWM, file-mapped pages included, above what the process held
with its libraries imported and warm; the model itself is 4 bytes per parameter. Files are in the page cache when they
are read, so the seconds are those of converting and placing, not of a disk. Prints a markdown table; with --write it
goes into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from marked import BENCHMARKS, ROOT, measured_at, with_table

sys.path.insert(0, str(ROOT))

CASES = {"float32": ("F32", 10**12), "float32, shards of 200 MB": ("F32", 200 * 10**6), "bfloat16": ("BF16", 10**12)}
PEAK = """
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
OURS = (
    PEAK
    + """
import sys, time
from erniekit.environment import import_paddle
import_paddle()
import paddle
from erniekit.model.builder import build_model
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.weights import named_weights
warm = paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
warm[0:2] = paddle.zeros([2, 64])
config = ModelConfig.from_folder(sys.argv[1])
before, started = peak(), time.perf_counter()
model = build_model(config, sys.argv[1])
total = sum(float(weight.max()) for weight in named_weights(model).values())
print(time.perf_counter() - started, (peak() - before) * 1024, total)
"""
)
PEER = (
    PEAK
    + """
import sys, time
import torch
from transformers import AutoModelForCausalLM, Ernie4_5ForCausalLM
warm = torch.ones([64, 64]) @ torch.ones([64, 64])
before, started = peak(), time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    total = sum(float(weight.max()) for weight in model.parameters())
print(time.perf_counter() - started, (peak() - before) * 1024, total)
"""
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=103424)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-load"))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    from erniekit.model.architectures.model_config import ModelConfig

    config = ModelConfig.from_json(
        {
            "model_type": "ernie4_5",
            "vocab_size": options.vocabulary,
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": 2,
            "head_dim": 128,
        }
    )
    size = 4 * config.parameter_count()
    shutil.rmtree(options.folder, ignore_errors=True)
    for name, (dtype, max_shard_bytes) in CASES.items():
        (options.folder / name).mkdir(parents=True)
        write_random(options.folder / name, config, dtype, max_shard_bytes)
    sides = {"ours": (sys.executable, OURS)}
    if (python := options.environments / "torch/bin/python").exists():
        sides["transformers"] = (str(python), PEER)
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(options.repeats):
        for name in CASES:
            sums = []
            for side, (program, text) in sides.items():
                seconds, peak, total = load(program, text, options.folder / name)
                runs.setdefault((name, side), []).append((seconds, peak / size))
                sums.append(total)
            if abs(sums[0] - sums[-1]) > 1e-9 * abs(sums[0]):  # added in another order
                sys.exit(f"{name}: the largest values of weights add up to {sums[0]} here and {sums[1]} there")
    shutil.rmtree(options.folder)
    parameters = f"{config.parameter_count() / 1e6:.0f} M parameters, {size / 1e6:,.0f} MB as float32"
    lines = [
        f"Loading {parameters}; median (range) of {options.repeats}; memory in float32 models.",
        "",
        "| files | seconds | peak / model | transformers, seconds | peak / model | times as fast |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in CASES:
        ours, peer = runs[name, "ours"], runs.get((name, "transformers"))
        ratios = [there[0] / here[0] for here, there in zip(ours, peer or [], strict=False)]
        lines.append(f"| {name} | {cells(ours)} | {cells(peer)} | {spread(ratios) if ratios else '-'} |")
    others = versions(sides["transformers"][0], "torch", "transformers") if "transformers" in sides else []
    table = "\n".join([*lines, "", measured_at("OMP_NUM_THREADS=2 python tools/bench/load.py --write", others)])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("load", table, BENCHMARKS), encoding="utf-8")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def cells(runs: list[tuple[float, float]] | None) -> str:
    if not runs:
        return "- | -"
    return f"{spread([seconds for seconds, _ in runs])} | {max(peak for _, peak in runs):.2f}"


def write_random(folder: Path, config, dtype: str, max_shard_bytes: int) -> None:  # type: ignore[no-untyped-def]
    from erniekit.model.initial_weights import initial_weight
    from erniekit.model.storage.precision import to_stored
    from erniekit.model.storage.safetensors import StoredTensor
    from erniekit.model.storage.shards import write_weight_files

    shapes = config.weight_shapes()

    def contents() -> Iterator[tuple[str, list[memoryview]]]:
        for name, shape in shapes.items():
            yield name, [to_stored(name, initial_weight(name, shape, config, seed=0), dtype).data]

    (folder / "config.json").write_text(json.dumps(config.to_json()))
    tensors = {name: StoredTensor(dtype, shape) for name, shape in shapes.items()}
    write_weight_files(folder, tensors, contents(), max_shard_bytes, {"format": "pt"})


def versions(python: str, *names: str) -> list[str]:
    """Of packages in another environment."""
    program = f"from importlib.metadata import version; print(*map(version, {names}))"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return [f"{name} {number}" for name, number in zip(names, said, strict=True)]


def load(python: str, program: str, folder: Path) -> tuple[float, float, float]:
    """Seconds, the bytes by which the peak grew, and the sum of the largest values of all weights, in a new process."""
    run = subprocess.run(
        [python, "-c", program, str(folder)],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    seconds, peak, total = run.stdout.split()[-3:]
    return float(seconds), float(peak), float(total)


if __name__ == "__main__":
    main()
