"""What saving and resuming cost: seconds that training waits, bytes, and memory beside training.

    python tools/bench/checkpoint.py [--layers 12] [--hidden 768] [--rounds 3] [--folder FOLDER] [--write]

Builds a random ERNIE-4.5 and its AdamW, writes training checkpoints (weights, moments, hashes, every file synced) while
training waits and beside it, and resumes: finds the newest complete one (reads and hashes every file), makes a model
and an optimizer from it, and compares them with what was saved. Then the sizes of checkpoints with what
`unified_checkpoint_config` and others leave out. Ways take turns. What is read lies in the page cache. Prints markdown
tables; with --write they go into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marked import BENCHMARKS, ROOT, measured_at, with_table

sys.path.insert(0, str(ROOT))

SYNC_SAVE, ASYNC_SAVE, ASYNC_SAVE_ON_DISK = "at once", "`async_save`", "`async_save`, no room in shared memory"


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


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


class Run:
    """A model with its optimizer, and ways to save them."""

    def __init__(self, config: Any, folder: Path, *, narrow: bool = False) -> None:
        from erniekit.config.sections.training import TrainingParameters
        from erniekit.model.builder import build_model
        from erniekit.model.norm import RMSNorm
        from erniekit.model.weights import named_weights
        from erniekit.training.optim.adamw import build_optimizer

        self.folder = folder
        self.model = build_model(config, None, seed=0)
        if narrow:  # as fp16_opt_level: O2 does on a GPU
            for layer in self.model.sublayers():
                if layer.parameters(include_sublayers=False) and not isinstance(layer, RMSNorm):
                    layer.to(dtype="bfloat16")
        self.parameters = named_weights(self.model)
        self.optimizer = build_optimizer(self.parameters, TrainingParameters())
        self.config = config
        self._fill_moments()

    def save(self, saver: Any = None, *, master_weights: Any = None, optimizer: bool = True, stage: str = "O0") -> Path:
        from erniekit.environment import cpu_settings, package_versions
        from erniekit.model.local_tensors import SingleProcessTensors, local_tensors
        from erniekit.model.weights import save_model_folder
        from erniekit.training.checkpoint.async_save import SYNC_SAVER
        from erniekit.training.checkpoint.master_weights import SEPARATE_MASTER_WEIGHTS as DEFAULT_MASTERS
        from erniekit.training.checkpoint.master_weights import master_weights_as_model
        from erniekit.training.checkpoint.quantized_state import FORMATS
        from erniekit.training.checkpoint.resume import RunIdentity
        from erniekit.training.checkpoint.state import TrainerState, save_checkpoint

        master_weights = master_weights or DEFAULT_MASTERS
        weights = local_tensors(self.parameters)
        if master_weights.stored == "as weights":
            weights = master_weights_as_model(weights, self.optimizer, self.parameters)
        return save_checkpoint(
            self.folder,
            TrainerState(step=1),
            identity=RunIdentity(0, "", {}, cpu_settings(), package_versions()),
            resolved_config={},
            write_model=lambda target: save_model_folder(
                self.model, target, full_tensors=SingleProcessTensors(weights)
            ),
            optimizer=self.optimizer if optimizer else None,
            parameters=self.parameters,
            master_weights=master_weights,
            moments=FORMATS.get(stage),
            saver=saver or SYNC_SAVER,
        )

    def _fill_moments(self) -> None:
        """Values, as after a step."""
        import paddle

        from erniekit.training.optim.adamw import optimizer_state

        for name, state in optimizer_state(self.optimizer, self.parameters).items():
            if "moment" in name:
                state.set_value(paddle.rand(state.shape, state.dtype) * 1e-4)

    def resume(self) -> dict[str, float]:
        """Seconds of what a run does with the checkpoint that it goes on from."""
        import paddle

        from erniekit.config.sections.training import TrainingParameters
        from erniekit.model.builder import build_model
        from erniekit.model.weights import named_weights
        from erniekit.training.checkpoint.atomic_folder import newest_complete
        from erniekit.training.checkpoint.state import load_optimizer
        from erniekit.training.optim.adamw import build_optimizer, optimizer_state

        times = [time.perf_counter()]

        def lap() -> float:
            times.append(time.perf_counter())
            return times[-1] - times[-2]

        folder, _ = newest_complete(self.folder)
        assert folder is not None
        seconds = {"find the newest complete one, every file hashed": lap()}
        parameters = named_weights(build_model(self.config, folder))
        seconds["make the model, load its weights"] = lap()
        optimizer = build_optimizer(parameters, TrainingParameters())
        load_optimizer(folder, optimizer, parameters)
        seconds["make the optimizer, load its state"] = lap()
        saved = self.parameters | optimizer_state(self.optimizer, self.parameters)
        for name, loaded in (parameters | optimizer_state(optimizer, parameters)).items():
            if not paddle.equal_all(loaded, saved[name]):
                sys.exit(f"{name} differs from what was saved")
        return seconds

    def fresh(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)


def timings(run: Run, rounds: int) -> Iterator[str]:
    """Saving in every way, then resuming: the lines of two tables."""
    from erniekit.training.checkpoint import async_save, atomic_folder

    found: dict[str, list[tuple[float, float, float]]] = {
        way: [] for way in (SYNC_SAVE, ASYNC_SAVE, ASYNC_SAVE_ON_DISK)
    }
    sealing: list[float] = []
    seal = atomic_folder.seal

    def timed_seal(folder: Path) -> None:
        started = time.perf_counter()
        seal(folder)
        sealing.append(time.perf_counter() - started)

    atomic_folder.seal = timed_seal
    for _ in range(rounds):
        for way, runs in found.items():
            run.fresh()
            saver: Any = async_save.SyncSaver()
            if way != SYNC_SAVE:
                room = way == ASYNC_SAVE
                saver = async_save.AsyncSaver(None, lambda folder: None, shared_memory=room)
            with saver:
                started = time.perf_counter()
                waits, memory = measured(lambda saver=saver: run.save(saver))  # type: ignore[misc]
            runs.append((waits, time.perf_counter() - started, memory))
    size = size_mb(run.folder)
    yield "| saving | training waits, s | complete after, s | MB of memory of the trainer | MB of shared memory |"
    yield "|---|---:|---:|---:|---:|"
    for way, runs in found.items():
        waits, complete, memory = (list(values) for values in zip(*runs, strict=True))
        shared = size if way == ASYNC_SAVE else 0
        yield f"| {way} | {shown(waits)} | {shown(complete)} | {max(memory):,.0f} | {shared:,.0f} |"
        if way == SYNC_SAVE:
            yield f"| of it hashing and syncing | {shown(sealing)} | | | |"
    resumed = [run.resume() for _ in range(rounds)]
    yield from ("", "| resuming | s |", "|---|---:|")
    for part in resumed[0]:
        yield f"| {part} | {shown([seconds[part] for seconds in resumed])} |"
    yield f"| together | {shown([sum(seconds.values()) for seconds in resumed])} |"


def sizes(run: Run, ways: Mapping[str, dict[str, Any]], kind: str) -> Iterator[str]:
    from erniekit.training.checkpoint import async_save

    whole = 0.0
    for name, values in ways.items():
        run.fresh()
        size = size_mb(run.save(async_save.SyncSaver(), **values))
        whole = whole or size
        yield f"| {kind} | {name} | {size:,.0f} | {size / whole:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-checkpoint"))
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    from erniekit.environment import import_paddle

    import_paddle()
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.training.checkpoint.master_weights import MasterWeightPolicy

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
    run = Run(config, options.folder / "run")
    lines = [*timings(run, options.rounds)]
    size = size_mb(run.folder)
    lines += ["", "| weights | what is left out | MB | |", "|---|---|---:|---:|"]
    plain = {
        "nothing": {},
        "`ignore_save_lr_and_optim`": {"optimizer": False},
        "`ckpt_quant_stage: O1`": {"stage": "O1"},
        "`ckpt_quant_stage: O2`": {"stage": "O2"},
    }
    lines += sizes(run, plain, "float32")
    narrow = Run(config, options.folder / "run", narrow=True)
    master_weights = {
        "nothing": {},
        "`skip_save_model_weight`": {"master_weights": MasterWeightPolicy("as weights")},
        "`remove_master_weight`": {"master_weights": MasterWeightPolicy("nowhere")},
    }
    lines += sizes(narrow, master_weights, "bfloat16 (O2)")
    shutil.rmtree(run.folder)
    title = f"{config.parameter_count() / 1e6:.1f} M parameters, a checkpoint of {size:,.0f} MB, median (range) of"
    command = "OMP_NUM_THREADS=1 python tools/bench/checkpoint.py --write"
    table = "\n".join([f"{title} {options.rounds}.", "", *lines, "", measured_at(command)])
    print(table)
    if options.write:
        BENCHMARKS.write_text(with_table("checkpoints", table, BENCHMARKS), encoding="utf-8")


if __name__ == "__main__":
    main()
