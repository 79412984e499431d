"""What recomputation and the optimizer's settings cost and save: peak memory and seconds of a training step.

    python tools/bench/memory.py [recompute] [optimizer] [--layers 6] [--tokens 2048] [--steps 3] [--threads 1]

Trains a random decoder (hidden size 256, vocabulary 8,192) on one packed row of log-normal documents: forward, fused
head and loss, backward, clipping, AdamW. Each way runs in a process of its own, the ways in turn for `--rounds` rounds;
the first step is not counted. Memory is the process's peak above what it held before its first step (recompute) or
before it had an optimizer (optimizer): resident pages that belong to the process, without those of mapped files, which
the system may take back at any time. Prints markdown tables, with the loss after the last step, which recomputation
must not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

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


class Peak:
    """The most anonymous memory that this process has held since `start`, in MiB above what it held then."""

    def start(self) -> None:
        self._base, self._most, self._running = anonymous(), 0.0, True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._running:
            self._most = max(self._most, anonymous() - self._base)
            time.sleep(0.002)

    def stop(self) -> float:
        self._running = False
        self._thread.join()
        return max(self._most, anonymous() - self._base)


def anonymous() -> float:
    """Resident memory without mapped files, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def train(way: str, options: argparse.Namespace) -> dict[str, float]:
    from erniekit.environment import import_paddle

    import_paddle()
    import numpy as np
    import paddle

    from erniekit.model import builder
    from erniekit.model.attention import AttentionPlan
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.head import token_loss
    from erniekit.model.recompute import Recompute
    from erniekit.model.weights import named_weights
    from erniekit.training.gradients import clip_by_norm, global_norm
    from erniekit.training.optimizer import OptimizerSettings, build_optimizer

    builder.keep_freed_memory = lambda: False  # so that what is freed leaves the process
    decoder = builder.build_model(ModelConfig(num_hidden_layers=options.layers, **SHAPES), None)
    chosen = RECOMPUTE[way]
    if chosen is not None:
        reentrant, first, part = chosen
        decoder.recompute = Recompute(reentrant, options.layers // 2 if first == "half" else first, part)
    parameters = named_weights(decoder)
    peak, tokens = Peak(), options.tokens
    optimizer = build_optimizer(parameters, OptimizerSettings())
    rng = np.random.default_rng(0)
    ends = np.minimum(np.cumsum(np.maximum(8, rng.lognormal(np.log(tokens / 6), 0.8, tokens)).astype(int)), tokens)
    lengths = np.diff(np.unique([0, *ends]))
    positions = np.concatenate([np.arange(length) for length in lengths])
    rows = np.repeat(np.cumsum(lengths), lengths)
    seconds, losses = [], []
    peak.start()
    for step in range(options.steps + 1):
        ids = np.random.default_rng(step).integers(3, 8192, (1, tokens))
        started = time.perf_counter()
        plan = AttentionPlan.build(rows[None, None, :, None])
        decoder.begin_micro_batch(step=step, micro_batch=0)
        hidden = decoder(paddle.to_tensor(ids), paddle.to_tensor(positions[None]), plan)
        loss = token_loss(decoder, hidden, paddle.to_tensor(np.roll(ids, -1, 1)), fused=True).loss_sum / tokens
        loss.backward()
        clip_by_norm(parameters.values(), float(global_norm(parameters.values())), 1.0)
        optimizer.set_lr(1e-3)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[1:]), "peak": peak.stop(), "loss": losses[-1]}


def table(title: str, ways: list[str], options: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    passed = [f"--{name}={getattr(options, name)}" for name in ("layers", "tokens", "steps")]
    for _ in range(options.rounds):
        for way in ways:
            command = [sys.executable, __file__, f"--work={way}", *passed]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(run.stdout.splitlines()[-1]))
    print(f"{title}: {options.layers} layers, {options.tokens:,} tokens, {options.threads} threads\n")
    print("| way | peak MiB | seconds a step, median (range) | x | loss |\n|---|---:|---:|---:|---:|")
    first = statistics.median(run["seconds"] for run in found[ways[0]])
    for way, runs in found.items():
        times, peak = [run["seconds"] for run in runs], statistics.median(run["peak"] for run in runs)
        middle, loss = statistics.median(times), runs[0]["loss"]
        spread = f"{middle:.2f} ({min(times):.2f}-{max(times):.2f})"
        print(f"| {way} | {peak:,.0f} | {spread} | {middle / first:.2f} | {loss:.7f} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="recompute", choices=["recompute"])
    for name, default in (("layers", 6), ("tokens", 2048), ("steps", 3), ("rounds", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", choices=list(RECOMPUTE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(train(options.work, options)))
        return
    if options.what == "recompute":
        table("recomputation", list(RECOMPUTE), options)


if __name__ == "__main__":
    main()
