"""What loading a model costs: seconds, with and without a first forward pass, and the peak of memory.

    python tools/bench/load.py [--layers 18] [--hidden 1024] [--vocabulary 103424] [--repeats 5] [--tokens 64]
                               [--environments .peers] [--folder /tmp/bench-load] [--write]

Writes random weights with ERNIE-4.5-0.3B's shapes (361 M parameters) as float32, bfloat16 and float32 shards, and loads
each as float32, in a process of its own and in turn with transformers where the environment of training_speed.py is
there; in a last row both draw random weights. A mapped file is only read when its values are used, so the seconds that
compare are those of loading and one forward pass; both sides must give the same logits. The peak is the kernel's VmHWM,
file-mapped pages included, above what the process held with its libraries imported and warm; the model itself is 4
bytes per parameter. Files are in the page cache when they are read, so the seconds are those of converting and placing,
not of a disk. The rate of float32 products is measured beside each run. Prints a markdown table; with --write it goes
into docs/benchmarks.md.
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
from dataclasses import dataclass
from pathlib import Path

from marked import BENCHMARKS, ROOT, measured_at, with_table
from rounds import counted

sys.path.insert(0, str(ROOT))

CASES = {"float32": ("F32", 10**12), "float32, shards of 200 MB": ("F32", 200 * 10**6), "bfloat16": ("BF16", 10**12)}
RANDOM = "none: random weights"
COMMON = """
import sys, time
folder, count, is_random = sys.argv[1], int(sys.argv[2]), bool(sys.argv[3:])
def peak():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
def rate(product):
    product()
    started = time.perf_counter()
    for _ in range(5):
        product()
    return 5 * 2 * 1024**3 / (time.perf_counter() - started) / 1e9
def report(started, loaded, before, logits, product):
    print(loaded - started, time.perf_counter() - started, peak() - before, rate(product), *logits)
"""
OURS = (
    COMMON
    + """
from erniekit.environment import import_paddle
import_paddle()
import numpy as np
import paddle
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention import AttentionPlan
from erniekit.model.builder import build_model
from erniekit.native import library
library.kernels()
a = paddle.ones([1024, 1024])
warm = paddle.matmul(a, a)
config = ModelConfig.from_folder(folder)
before, started = peak(), time.perf_counter()
model = build_model(config, None if is_random else folder, mapped=True)
loaded = time.perf_counter()
ids = paddle.arange(5, 5 + count).unsqueeze(0)
plan = AttentionPlan.build(np.full((1, 1, count, 1), count, np.int32))
with paddle.no_grad():
    hidden = model(ids, ids - 5, plan)
    logits = model.head(hidden[:, -1]).flatten()[:8].numpy().tolist()
report(started, loaded, before, logits, lambda: paddle.matmul(a, a))
"""
)
PEER = (
    COMMON
    + """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Ernie4_5ForCausalLM
a = torch.ones([1024, 1024])
warm = a @ a
before, started = peak(), time.perf_counter()
if is_random:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
else:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
loaded = time.perf_counter()
with torch.no_grad():
    logits = model(torch.arange(5, 5 + count).unsqueeze(0), logits_to_keep=1).logits.flatten()[:8].tolist()
report(started, loaded, before, logits, lambda: a @ a)
"""
)


@dataclass(frozen=True)
class Run:
    """Of one process.

    Attributes:
        load, with_forward: seconds until the model is there, and until it has given its first logits.
        peak: bytes by which the peak of memory grew.
        rate: of float32 products behind it, GF/s.
    """

    load: float
    with_forward: float
    peak: float
    rate: float
    logits: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=103424)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of the first forward pass")
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
    runs: dict[tuple[str, str], list[Run]] = {}
    for _ in counted(range(options.repeats), "loading"):
        for name in (*CASES, RANDOM):
            extra = [str(options.tokens), *(["random"] if name == RANDOM else [])]
            own = options.folder / ("float32" if name == RANDOM else name)
            found = [load(program, text, str(own), *extra) for program, text in sides.values()]
            for side, one in zip(sides, found, strict=True):
                runs.setdefault((name, side), []).append(one)
            largest = max(map(abs, found[0].logits))
            difference = max(abs(a - b) for a, b in zip(found[0].logits, found[-1].logits, strict=True))
            if name != RANDOM and difference > 1e-4 * largest:
                sys.exit(f"{name}: logits of the two sides differ by {difference:.2g} of {largest:.2g}")
    shutil.rmtree(options.folder)
    parameters = f"{config.parameter_count() / 1e6:.0f} M parameters, {size / 1e6:,.0f} MB as float32"
    rates = [one.rate for several in runs.values() for one in several]
    lines = [
        f"Loading {parameters}, as a float32 model; median (range) of {options.repeats}. The forward pass is the "
        f"first, of {options.tokens} tokens. float32 products ran at {spread(rates, 0)} GF/s behind the runs.",
        "",
        "| files | load, s | with forward, s | peak / model | transformers: load, s | with forward, s | peak / model "
        "| times as fast, with forward |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in (*CASES, RANDOM):
        ours, peer = runs[name, "ours"], runs.get((name, "transformers"))
        ratios = [there.with_forward / here.with_forward for here, there in zip(ours, peer or [], strict=False)]
        lines.append(f"| {name} | {cells(ours, size)} | {cells(peer, size)} | {spread(ratios) if ratios else '-'} |")
    others = versions(sides["transformers"][0], "torch", "transformers") if "transformers" in sides else []
    table = "\n".join([*lines, "", measured_at("OMP_NUM_THREADS=2 python tools/bench/load.py --write", others)])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("load", table, BENCHMARKS), encoding="utf-8")


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def cells(runs: list[Run] | None, size: int) -> str:
    if not runs:
        return "- | - | -"
    seconds = f"{spread([one.load for one in runs])} | {spread([one.with_forward for one in runs])}"
    return f"{seconds} | {max(one.peak for one in runs) / size:.2f}"


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


def load(python: str, program: str, *arguments: str) -> Run:
    """Load in a new process."""
    run = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if run.returncode:
        sys.exit(run.stderr)
    seconds, with_forward, peak, rate, *logits = map(float, run.stdout.splitlines()[-1].split())
    return Run(seconds, with_forward, peak, rate, tuple(logits))


if __name__ == "__main__":
    main()
