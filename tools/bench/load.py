"""What loading a model costs: seconds and the peak of memory, for files of several types and layouts.

    python tools/bench/load.py [--layers 18] [--hidden 1024] [--vocabulary 103424] [--folder /tmp/bench-load]

Writes random weights with ERNIE-4.5-0.3B's shapes (361 M parameters) as float32, bfloat16 and float32 shards, loads
each in a process of its own, and prints a markdown table. The peak is the kernel's VmHWM, file-mapped pages included,
above what the process held with Paddle imported and warm; the model itself is 4 bytes per parameter. Files are in the
page cache when they are read, so the seconds are those of converting and placing, not of a disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CASES = {"float32": ("F32", 10**12), "float32, shards of 200 MB": ("F32", 200 * 10**6), "bfloat16": ("BF16", 10**12)}
LOAD = """
import sys, time
from erniekit.environment import import_paddle
import_paddle()
import paddle
from erniekit.model.builder import build_model
from erniekit.model.configuration import ModelConfig
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
warm = paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
warm[0:2] = paddle.zeros([2, 64])
config = ModelConfig.from_folder(sys.argv[1])
before, started = peak(), time.perf_counter()
model = build_model(config, sys.argv[1])
print(time.perf_counter() - started, (peak() - before) * 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=103424)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-load"))
    options = parser.parse_args()
    from erniekit.environment import package_versions
    from erniekit.model.configuration import ModelConfig

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
    print(f"{config.parameter_count() / 1e6:.1f} M parameters, {size / 1e6:,.0f} MB as float32, {package_versions()}\n")
    print(f"| files | MB | seconds, fastest of {options.repeats} | peak MB | peak / model |")
    print("|---|---|---|---|---|")
    for name, (dtype, max_shard_bytes) in CASES.items():
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        write_random(options.folder, config, dtype, max_shard_bytes)
        stored = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
        runs = [load(options.folder) for _ in range(options.repeats)]
        seconds, peak = min(run[0] for run in runs), max(run[1] for run in runs)
        print(f"| {name} | {stored / 1e6:,.0f} | {seconds:.2f} | {peak / 1e6:,.0f} | {peak / size:.2f} |", flush=True)
    shutil.rmtree(options.folder)


def write_random(folder: Path, config, dtype: str, max_shard_bytes: int) -> None:  # type: ignore[no-untyped-def]
    from erniekit.model.initial_weight import initial_weight
    from erniekit.model.storage.precision import to_stored
    from erniekit.model.storage.safetensors_file import StoredTensor
    from erniekit.model.storage.shards import write_weight_files

    shapes = config.weight_shapes()

    def contents() -> Iterator[tuple[str, list[memoryview]]]:
        for name, shape in shapes.items():
            yield name, [to_stored(name, initial_weight(name, shape, config, seed=0), dtype).data]

    (folder / "config.json").write_text(json.dumps(config.to_json()))
    tensors = {name: StoredTensor(dtype, shape) for name, shape in shapes.items()}
    write_weight_files(folder, tensors, contents(), max_shard_bytes, {"format": "pt"})


def load(folder: Path) -> tuple[float, float]:
    """Seconds, and the bytes by which the peak grew, in a new process."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    seconds, peak = run.stdout.split()[-2:]
    return float(seconds), float(peak)


if __name__ == "__main__":
    main()
