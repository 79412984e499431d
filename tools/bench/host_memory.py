"""What keeping freed memory is worth (erniekit/model/device.py): seconds of a training step, and peak memory.

    python tools/bench/host_memory.py [--layers 3] [--tokens 2048] [--steps 4] [--rounds 3] [--threads 2]

Trains a random model with the shapes of ERNIE-4.5-0.3B on one row of random tokens: forward, fused head and loss,
backward, clipping, AdamW. With and without take turns, each time in a new process, because what the C library is told
holds for the whole process. The first step is not counted. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rounds import counted

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SHAPES = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 103424, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
SIDES = ("kept", "given back")


def work(side: str, layers: int, tokens: int, steps: int) -> None:
    """Train and print the seconds of each step but the first."""
    from erniekit.environment import import_paddle

    import_paddle()
    import numpy as np
    import paddle

    from erniekit.model import builder
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.attention import AttentionPlan
    from erniekit.model.head import token_loss

    if side == "given back":
        builder.keep_freed_memory = lambda: False
    config = ModelConfig(num_hidden_layers=layers, **SHAPES)
    decoder = builder.build_model(config, None)
    optimizer = paddle.optimizer.AdamW(
        1e-4, parameters=decoder.parameters(), grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0)
    )
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (1, tokens))
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        plan = AttentionPlan.build(np.full((1, 1, tokens, 1), tokens))
        hidden = decoder(paddle.to_tensor(ids), paddle.arange(tokens).unsqueeze(0), plan)
        loss = token_loss(decoder, hidden, paddle.to_tensor(np.roll(ids, -1, 1)), fused=True)
        (loss.loss_sum / tokens).backward()
        optimizer.step()
        optimizer.clear_grad()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds[1:], "peak_mb": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 3), ("tokens", 2048), ("steps", 4), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.layers, options.tokens, options.steps)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    passed = [f"--{name}={getattr(options, name)}" for name in ("layers", "tokens", "steps")]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in counted(range(options.rounds), "memory of the host"):
        for side in SIDES:
            command = [sys.executable, __file__, "--work", side, *passed]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            figures = json.loads(run.stdout.splitlines()[-1])
            seconds[side] += figures["seconds"]
            peaks[side].append(figures["peak_mb"])
    print(f"{options.layers} layers, {options.tokens:,} tokens, {options.threads} threads\n")
    print("| freed memory is | seconds a step, median (range) | peak MB, median |\n|---|---:|---:|")
    for side in SIDES:
        times = seconds[side]
        spread = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
        print(f"| {side} | {spread} | {statistics.median(peaks[side]):,.0f} |")


if __name__ == "__main__":
    main()
