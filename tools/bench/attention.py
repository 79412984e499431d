"""Attention by documents against a dense mask: time and peak memory, forward and backward.

    python tools/bench/attention.py [--threads 2] [--lengths 1024 2048 4096 8192]

One row of log-normal documents (mean 512 tokens), 8 query heads, 2 key heads, head size 64, float32. Every figure
comes from a fresh process; "peak" is how far the process's resident memory rose above its level before the first call.
Times are the best of several calls of one process. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HEADS, KEY_HEADS, HEAD_DIM, MEAN = 8, 2, 64, 512


def document_ends(length: int) -> np.ndarray:
    """FlashMask's causal indices [1, 1, S, 1] of a full row of documents."""
    rng = np.random.default_rng(length)
    sigma = 0.8
    borders = np.cumsum(np.maximum(8, rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, length // 8)).astype(int))
    borders = np.minimum(borders, length)
    ends = borders[np.searchsorted(borders, np.arange(length), side="right")]
    return ends.astype(np.int32).reshape(1, 1, length, 1)


def measure(length: int, how: str) -> dict[str, float]:
    sys.path.insert(0, str(ROOT))
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.model.attention import AttentionPlan, attention

    rng = np.random.default_rng(0)
    q, k, v = (
        paddle.to_tensor(rng.standard_normal((1, length, heads, HEAD_DIM)), "float32", stop_gradient=False)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    gradient = paddle.to_tensor(rng.standard_normal((1, length, HEADS, HEAD_DIM)), "float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    indices = document_ends(length) if how != "one document" else np.full((1, 1, length, 1), length, np.int32)
    start = time.perf_counter()
    plan = AttentionPlan.build(indices, dense=how == "dense")
    plan_seconds = time.perf_counter() - start
    seconds = []
    while len(seconds) < 3 or sum(seconds) < 2:
        start = time.perf_counter()
        attention(q, k, v, plan).backward(gradient)
        seconds.append(time.perf_counter() - start)
        for tensor in (q, k, v):
            tensor.clear_gradient(set_to_zero=False)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    documents = len(np.unique(indices))
    return {"ms": min(seconds) * 1e3, "plan_ms": plan_seconds * 1e3, "peak_mb": peak, "documents": documents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("ANSWER " + json.dumps(measure(int(args.measure[0]), args.measure[1])))
        return
    print(
        "| tokens | documents | plan, ms | by documents, ms / MB | dense mask, ms / MB | ratio | full causal, ms / MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for length in args.lengths:
        results = {}
        for how in ("documents", "dense", "one document"):
            command = [sys.executable, __file__, "--measure", str(length), how]
            environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            results[how] = json.loads(done.stdout.split("ANSWER ")[1])
        ours, dense, single = results["documents"], results["dense"], results["one document"]
        cells = [f"{result['ms']:,.0f} / {result['peak_mb']:,.0f}" for result in (ours, dense, single)]
        print(
            f"| {length} | {ours['documents']} | {ours['plan_ms']:.1f} | {cells[0]} | {cells[1]} "
            f"| {dense['ms'] / ours['ms']:.1f} / {dense['peak_mb'] / max(ours['peak_mb'], 1):.1f} | {cells[2]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
