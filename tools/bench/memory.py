"""What recomputation and the optimizer's settings cost and save: peak memory and seconds of a training step.

    python tools/bench/memory.py [recompute | optimizer] [--layers 6] [--tokens 2048] [--steps 3] [--threads 1]

Trains a random decoder (hidden size 256, vocabulary 8,192) on one packed row of log-normal documents: forward, fused
head and loss, backward, clipping, AdamW. Each way runs in a process of its own, the ways in turn for `--rounds` rounds;
the first step is not counted. "peak" is the most that the process has held above what it held before it had an
optimizer: resident pages of its own. "mapped" is the same of mapped files, which the system may take back at any
time. Seconds are of CPU time, which others on the machine change less. Prints a markdown table with the loss of the
last step, which recomputation and offloading must not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from rounds import counted

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SHAPES = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 8192, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
RECOMPUTE = {
    "none": None,
    **{f"{part}, {how}": (how == "PyLayer", 0, part) for part in ("core_attn", "full_attn", "full")
       for how in ("hooks", "PyLayer")},
    "full, half of the layers": (False, "half", "full"),
}  # fmt: skip
OPTIMIZER = {  # -> bfloat16, in a file, released
    "AdamW": None,
    "adamw_custom": (False, False, False),
    "use_lowprecision_moment": (True, False, False),
    "offload_optim": (False, True, False),
    "tensorwise_offload_optimizer": (False, True, True),
    "both": (True, True, True),
}


class Peak:
    """The most memory of its own, and of mapped files, that this process has held since `start`, in MiB above what it
    held then."""

    def start(self) -> None:
        self._base, self._most, self._running = resident(), [0.0, 0.0], True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._running:
            self._most = [
                max(most, now - base) for most, now, base in zip(self._most, resident(), self._base, strict=True)
            ]
            time.sleep(0.002)

    def stop(self) -> list[float]:
        self._running = False
        self._thread.join()
        return self._most


def resident() -> tuple[float, float]:
    """Memory of this process alone, and of mapped files, MiB."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line[0].startswith("Rss")}
    return found["RssAnon"], found["RssFile"] + found["RssShmem"]


def train(way: str, options: argparse.Namespace) -> dict[str, float]:
    from erniekit.environment import import_paddle

    import_paddle()
    import numpy as np
    import paddle

    from erniekit.config.sections.training import TrainingParameters
    from erniekit.model import builder
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.attention import AttentionPlan
    from erniekit.model.head import token_loss
    from erniekit.model.recompute import Recompute
    from erniekit.model.weights import named_weights
    from erniekit.training.gradients import clip_by_norm, global_norm
    from erniekit.training.optim.adamw import build_optimizer, create_state, stateless_optimizer
    from erniekit.training.optim.offload import MomentStorage, StoredMomentsAdamW

    builder.keep_freed_memory = lambda: False  # so that what is freed leaves the process
    decoder = builder.build_model(ModelConfig(num_hidden_layers=options.layers, **SHAPES), None)
    chosen = RECOMPUTE.get(way)
    if chosen is not None:
        reentrant, first, part = chosen
        decoder.recompute = Recompute(reentrant, options.layers // 2 if first == "half" else first, part)
    parameters = named_weights(decoder)
    peak, tokens = Peak(), options.tokens
    folder = tempfile.TemporaryDirectory(dir=ROOT)
    peak.start()
    if (kept := OPTIMIZER.get(way)) is None:
        optimizer = build_optimizer(parameters, TrainingParameters())
    else:
        storage = MomentStorage(kept[0], Path(folder.name) if kept[1] else None, kept[2])
        make = partial(StoredMomentsAdamW, storage)
        optimizer = stateless_optimizer(parameters, TrainingParameters(), make)
        create_state(optimizer, optimizer._parameter_list)
    rng = np.random.default_rng(0)
    ends = np.minimum(np.cumsum(np.maximum(8, rng.lognormal(np.log(tokens / 6), 0.8, tokens)).astype(int)), tokens)
    lengths = np.diff(np.unique([0, *ends]))
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.cumsum(lengths), lengths)
    seconds, updates, losses = [], [], []
    for step in range(options.steps + 1):
        ids = np.random.default_rng(step).integers(3, 8192, (1, tokens))
        started = time.process_time()
        plan = AttentionPlan.build(rows[None, None, :, None], dense=options.dense)
        decoder.begin_micro_batch(step=step, micro_batch=0)
        hidden = decoder(paddle.to_tensor(ids), paddle.to_tensor(positions[None]), plan)
        loss = token_loss(decoder, hidden, paddle.to_tensor(np.roll(ids, -1, 1)), fused=True).loss_sum / tokens
        loss.backward()
        clip_by_norm(parameters.values(), float(global_norm(parameters.values())), 1.0)
        optimizer.set_lr(1e-3)
        before = time.process_time()
        optimizer.step()
        updates.append(time.process_time() - before)
        optimizer.clear_grad(set_to_zero=False)
        losses.append(float(loss))
        seconds.append(time.process_time() - started)
    own, mapped = peak.stop()
    folder.cleanup()
    figures = {"seconds": statistics.median(seconds[1:]), "update": statistics.median(updates[1:])}
    return {**figures, "peak": own, "mapped": mapped, "loss": losses[-1]}


def table(title: str, ways: list[str], options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    passed = [f"--{name}={getattr(options, name)}" for name in ("layers", "tokens", "steps")]
    passed += ["--dense"] * options.dense
    for _ in counted(range(options.rounds), title):
        for way in ways:
            command = [sys.executable, __file__, f"--work={way}", *passed]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(run.stdout.splitlines()[-1]))
    mask = ", dense mask" if options.dense else ""
    print(f"{title}: {options.layers} layers, {options.tokens:,} tokens, {options.threads} threads{mask}\n")
    print("| way | peak MiB | mapped MiB | CPU seconds a step, least (most) | x | of it the update | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    first = min(run["seconds"] for run in found[ways[0]])
    for way, runs in found.items():
        times = [run["seconds"] for run in runs]
        peak, mapped, update = (statistics.median(run[name] for run in runs) for name in ("peak", "mapped", "update"))
        least, loss = min(times), runs[0]["loss"]
        print(
            f"| {way} | {peak:,.0f} | {mapped:,.0f} | {least:.2f} ({max(times):.2f}) | {least / first:.2f} "
            f"| {update:.3f} | {loss:.7f} |"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="recompute", choices=["recompute", "optimizer"])
    for name, default in (("layers", 6), ("tokens", 2048), ("steps", 3), ("rounds", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dense", action="store_true", help="attention with a dense mask")
    parser.add_argument("--work", choices=[*RECOMPUTE, *OPTIMIZER], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(train(options.work, options)))
        return
    table(options.what, list(RECOMPUTE if options.what == "recompute" else OPTIMIZER), options)


if __name__ == "__main__":
    main()
