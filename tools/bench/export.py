"""What loading, merging and exporting a model with adapters cost: seconds and memory, each in a process of its own.

    python tools/bench/export.py [--layers 20] [--hidden 1024] [--folder /tmp/bench-export]

Writes a random ERNIE-4.5 of about 300 M parameters as bfloat16, and rank-8 adapters for all its linear layers. Then
each task runs in a process of its own, which reports the peak of its resident memory (VmHWM) beyond what its imports
took. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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


def write_model(folder: Path, layers: int, hidden: int) -> int:
    """A base model and its adapters, from random numbers, tensor by tensor; returns the number of parameters."""
    import numpy as np

    from erniekit.model.adapters.files import StoredAdapters, write_adapters
    from erniekit.model.adapters.low_rank import Factors
    from erniekit.model.adapters.settings import LoraSettings, linear_shapes
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.storage.precision import to_stored
    from erniekit.model.storage.safetensors_file import StoredTensor
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
    linears = linear_shapes(shapes)
    factors = {
        path: Factors(
            rng.standard_normal((inputs, RANK), np.float32) / inputs**0.5,
            rng.standard_normal((RANK, outputs), np.float32) * 0.01,
        )
        for path, (outputs, inputs) in linears.items()
    }
    settings = LoraSettings(RANK, 2.0 * RANK, target_modules=tuple(linears))
    write_adapters(folder / "adapters", StoredAdapters(settings, factors), shapes, str(base))
    return config.parameter_count()


def task(name: str, folder: Path) -> Callable[[], Any]:
    """One of TASKS, its imports done."""
    from erniekit.environment import import_paddle

    base, adapters = folder / "base", folder / "adapters"
    if name == "split":
        from erniekit.runners.split import split_model

        return lambda: split_model(folder / "exported", folder / "split", 10**8, say=quiet)
    import_paddle()
    from erniekit.model.adapters.merge import merge_adapters
    from erniekit.model.builder import build_model
    from erniekit.model.configuration import ModelConfig
    from erniekit.parameters import Config
    from erniekit.runners.export import export_model
    from erniekit.runners.trained_model import find_trained_model
    from erniekit.runners.trained_weights import open_trained_weights, reference_types, stored_types, write_weights

    config = Config.load(None, ["max_shard_size=0.25"], verb="export")
    model_config = ModelConfig.from_folder(base)

    def stream() -> None:
        model = find_trained_model(adapters, config)
        weights = open_trained_weights(model)
        types = stored_types(list(weights.shapes), reference_types(model, model_config)[1], None)
        (folder / "streamed").mkdir()
        write_weights(folder / "streamed", weights, types, 250_000_000)

    return {
        "load": lambda: build_model(model_config, base),
        "adapters": lambda: build_model(model_config, base, adapters=adapters),
        "merge": lambda: merge_adapters(build_model(model_config, base, adapters=adapters)),
        "stream": stream,
        "export": lambda: export_model(adapters, folder / "exported", config, say=quiet),
    }[name]


def quiet(line: str) -> None:
    """The progress of a task is of no interest here."""


def peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-export"))
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        run = task(options.task, options.folder)
        before, started = peak_mb(), time.perf_counter()
        run()
        print(json.dumps([time.perf_counter() - started, peak_mb() - before]))
        return
    from erniekit.environment import package_versions

    shutil.rmtree(options.folder, ignore_errors=True)
    parameters = write_model(options.folder, options.layers, options.hidden)
    print(
        f"{parameters / 1e6:.0f} M parameters: {parameters * 4e-6:,.0f} MB as float32, {parameters * 2e-6:,.0f} MB "
        f"as bfloat16; LoRA of rank {RANK} on every linear layer; {package_versions()}\n"
    )
    print("| | seconds | MB of memory at most | of the float32 model |\n|---|---|---|---|")
    for name, title in TASKS.items():
        command = [sys.executable, __file__, "--task", name, "--folder", str(options.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, memory = json.loads(done.stdout.splitlines()[-1])
        print(f"| {title} | {seconds:.1f} | {memory:,.0f} | {memory / (parameters * 4e-6):.2f} |", flush=True)
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
