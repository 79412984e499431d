"""What saving and resuming cost: seconds, bytes and memory beside training.

    python tools/bench/checkpoint.py [--layers 12] [--hidden 768] [--folder /tmp/bench-checkpoint]

Builds a random ERNIE-4.5 and its AdamW, writes a training checkpoint (weights, moments, hashes, every file synced),
looks for the newest complete one (reads and hashes every file), and loads the optimizer's state back. Prints a
markdown table.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the most memory (MB) that the process held beyond what it held before."""
    before, peak, done = resident_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    return seconds, max(0.0, peak[0] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-checkpoint"))
    options = parser.parse_args()
    from erniekit.environment import cpu_settings, import_paddle, package_versions

    import_paddle()
    from erniekit.model.builder import build_model
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.weights import named_weights, save_model_folder
    from erniekit.training.checkpoint import TrainerState, load_optimizer, save_checkpoint
    from erniekit.training.checkpoint_folder import newest_complete
    from erniekit.training.optimizer import OptimizerSettings, build_optimizer
    from erniekit.training.run_identity import RunIdentity

    config = ModelConfig.from_json(
        {
            "model_type": "ernie4_5",
            "vocab_size": 16384,
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": options.hidden // 64,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    )
    model = build_model(config, None, seed=0)
    parameters = named_weights(model)
    optimizer = build_optimizer(parameters, OptimizerSettings())
    folder = options.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def save() -> None:
        save_checkpoint(
            folder,
            TrainerState(step=1),
            identity=RunIdentity(0, "", {}, cpu_settings(), package_versions()),
            resolved_config={},
            write_model=lambda target: save_model_folder(model, target),
            optimizer=optimizer,
            parameters=parameters,
        )

    rows = [("save", *measured(save))]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    rows.append(("find the newest complete one", *measured(lambda: newest_complete(folder))))
    rows.append(
        ("load the optimizer", *measured(lambda: load_optimizer(folder / "checkpoint-1", optimizer, parameters)))
    )
    shutil.rmtree(folder)
    print(f"{config.parameter_count() / 1e6:.1f} M parameters, checkpoint of {size:,.0f} MB, {package_versions()}\n")
    print("| | seconds | MB/s | MB of memory beside training |\n|---|---|---|---|")
    for name, seconds, memory in rows:
        print(f"| {name} | {seconds:.2f} | {size / seconds:,.0f} | {memory:,.0f} |")


if __name__ == "__main__":
    main()
