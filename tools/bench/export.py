"""What loading, merging and exporting a model with adapters cost: seconds and memory, each in a process of its own.

    python tools/bench/export.py [--layers 20] [--hidden 1024] [--rounds 3] [--environments .peers]
                                 [--folder /tmp/bench-export] [--write]

Writes a random ERNIE-4.5 of about 300 M parameters as bfloat16, and rank-8 adapters for all its linear layers. Then
each task runs in a process of its own, which reports the peak of its resident memory (VmHWM) beyond what its imports
took; the tasks take turns. Where the environment of training_speed.py is there, peft merges the same model and
transformers writes it, and the weights must be the same but for rounding. Prints a markdown table; with --write it goes
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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from load import PEAK, spread, versions
from marked import BENCHMARKS, ROOT, measured_at, with_table
from rounds import counted

sys.path.insert(0, str(ROOT))

RANK = 8
TASKS = {
    "load": "load the base",
    "adapters": "load the base and its adapters",
    "merge": "load both and merge in memory",
    "stream": "merge from file to file, as bfloat16 in shards of 0.25 GB",
    "export": "`erniekit export`, its check against the adapter model included",
    "split": "`erniekit split` of the result to 0.1 GB",
}

PEER = "load, merge and save by peft and transformers, without a check"
MERGE = (
    PEAK
    + """
import json, sys, time
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, Ernie4_5ForCausalLM
folder, before, started = sys.argv[1], peak(), time.perf_counter()
base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.bfloat16)
merged = PeftModel.from_pretrained(base, f"{folder}/adapters").merge_and_unload()
merged.save_pretrained(f"{folder}/peer", max_shard_size="250MB")
print(json.dumps([time.perf_counter() - started, (peak() - before) * 1024 / 1e6]))
"""
)


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """A base model and its adapters, from random numbers, tensor by tensor; returns the number of parameters."""
    import numpy as np

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.lora.config import LoraSettings
    from erniekit.model.lora.init import Factors
    from erniekit.model.lora.peft_files import StoredAdapters, write_adapters
    from erniekit.model.storage.precision import to_stored
    from erniekit.model.storage.safetensors import StoredTensor
    from erniekit.model.storage.shards import write_weight_files

    config = ModelConfig.from_json(
        {
            "model_type": "ernie4_5",
            "vocab_size": 32768,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )
    rng = np.random.default_rng(0)
    shapes = config.weight_shapes()

    def values(name: str, shape: tuple[int, ...]) -> Any:
        drawn = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.02
        return to_stored(name, drawn, "BF16").data

    def contents() -> Iterator[tuple[str, list[Any]]]:
        for name, shape in shapes.items():
            yield name, [values(name, shape)]

    base = folder / "base"
    base.mkdir(parents=True)
    tensors = {name: StoredTensor("BF16", shape) for name, shape in shapes.items()}
    write_weight_files(base, tensors, contents(), 10**9, {"format": "pt"})
    (base / "config.json").write_text(json.dumps(config.to_json()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples/models/tiny-ernie" / name, base)
    linears = config.linear_shapes()
    factors = {
        path: Factors(
            rng.standard_normal((inputs, RANK), np.float32) / inputs**0.5,
            rng.standard_normal((RANK, outputs), np.float32) * 0.01,
        )
        for path, (outputs, inputs) in linears.items()
    }
    settings = LoraSettings(RANK, 2.0 * RANK, target_modules=tuple(linears))
    write_adapters(folder / "adapters", StoredAdapters(settings, factors), config, str(base))
    return config.parameter_count()


def task(name: str, folder: Path) -> Callable[[], Any]:
    """One of TASKS, its imports done."""
    from erniekit.environment import import_paddle

    base, adapters = folder / "base", folder / "adapters"
    if name == "split":
        from erniekit.export.split import split_model

        return lambda: split_model(folder / "exported", folder / "split", 10**8)
    import_paddle()
    from erniekit.config import Config
    from erniekit.export.export import export_model
    from erniekit.export.trained_model import find_trained_model
    from erniekit.export.trained_weights import open_trained_weights, reference_types, stored_types, write_weights
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.lora.lora import merge_adapters

    config = Config.load(None, ["max_shard_size=0.25"], verb="export")
    model_config = ModelConfig.from_folder(base)

    def stream() -> None:
        model = find_trained_model(adapters, config)
        weights = open_trained_weights(model)
        types = stored_types(
            model_config.architecture, list(weights.shapes), reference_types(model, model_config)[1], None
        )
        (folder / "streamed").mkdir()
        write_weights(folder / "streamed", weights, types, 250_000_000)

    return {
        "load": lambda: build_model(model_config, base),
        "adapters": lambda: build_model(model_config, base, adapters=adapters),
        "merge": lambda: merge_adapters(build_model(model_config, base, adapters=adapters)),
        "stream": stream,
        "export": lambda: export_model(adapters, folder / "exported", config),
    }[name]


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-export"))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, python = options.folder, options.environments / "torch/bin/python"
    if options.task:
        run = task(options.task, folder)
        before, started = peak_mb(), time.perf_counter()
        run()
        print(json.dumps([time.perf_counter() - started, peak_mb() - before]))
        return
    shutil.rmtree(folder, ignore_errors=True)
    parameters = write_model(folder, options.layers, options.hidden)
    commands = {
        title: [sys.executable, __file__, "--task", name, "--folder", str(folder)] for name, title in TASKS.items()
    }
    if python.exists():
        commands[PEER] = [str(python), "-c", MERGE, str(folder)]
    runs: dict[str, list[tuple[float, float]]] = {title: [] for title in commands}
    for _ in counted(range(options.rounds), "exporting"):
        for name in ("streamed", "exported", "split", "peer"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for title, command in commands.items():
            runs[title].append(alone(command))
        if PEER in commands:
            compare(folder / "exported", folder / "peer")
    lines = [
        f"{parameters / 1e6:.0f} M parameters, {parameters * 2e-6:,.0f} MB as bfloat16; LoRA of rank {RANK} on every "
        f"linear layer; median (range) of {options.rounds}.",
        "",
        "| | seconds | MB at most | of the float32 model |",
        "|---|---:|---:|---:|",
    ]
    for title, measured in runs.items():
        memory = statistics.median(megabytes for _, megabytes in measured)
        seconds = spread([seconds for seconds, _ in measured])
        lines.append(f"| {title} | {seconds} | {memory:,.0f} | {memory / (parameters * 4e-6):.2f} |")
    shutil.rmtree(folder)
    others = versions(str(python), "torch", "transformers", "peft") if PEER in commands else []
    table = "\n".join([*lines, "", measured_at("OMP_NUM_THREADS=2 python tools/bench/export.py --write", others)])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("export", table, BENCHMARKS), encoding="utf-8")


def alone(command: list[str]) -> tuple[float, float]:
    """Seconds and MB that a process has printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, megabytes


def compare(ours: Path, theirs: Path) -> None:
    """Both round float32 sums to bfloat16, so weights may differ by the last of its 8 bits."""
    import numpy as np

    from erniekit.model.storage.shards import open_weight_files

    here, there = open_weight_files(ours), open_weight_files(theirs)
    for name in here.keys() & there.keys():
        one, other = here[name].read(name), there[name].read(name)
        if not np.allclose(one, other, rtol=2**-6, atol=1e-4):
            sys.exit(f"{name}: exported and merged by peft differ by {np.abs(one - other).max()}")
    if missing := here.keys() ^ there.keys() - {"lm_head.weight"}:
        sys.exit(f"only one side has {sorted(missing)[:5]}")


if __name__ == "__main__":
    main()
