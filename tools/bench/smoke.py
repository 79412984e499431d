"""Check whether something has become slower: compare with figures that smoke.json records.

    python tools/bench/smoke.py [--record]

Counts of kernels that a step starts are exact. Ratios are of processor time within this run, the best of several tries
of either side in turn, with a wide margin. They depend on the maker of the processor (RMSNorm over plain operations
is 0.19 on one and 0.36 on another, for the same code), so each maker has its own; an unknown one is compared with the
largest. Prints what moved; exits with 1 where a figure is worse than its limit. `--record` writes what was found into
smoke.json, for a commit that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # as when the figures were recorded: processor time of several threads is another
sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))
import ours
import paddle
import paddle.nn.functional as F
import workload
from paddle import profiler

sys.path.insert(0, str(Path(__file__).resolve().parent))
from step_profile import model_flops

from erniekit.data.packing import pack_greedy
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.attention import AttentionPlan, attention
from erniekit.model.mlp import swiglu
from erniekit.model.norm import rms_norm

RECORDED = Path(__file__).with_suffix(".json")
COUNT_MARGIN, RATIO_MARGIN = 1.05, 2.0


def in_turn(first: Callable[[], object], second: Callable[[], object], tries: int = 7) -> float:
    """Processor time of `first` over that of `second`, the best of some tries of each."""
    best = [float("inf"), float("inf")]
    for _ in range(tries):
        for number, function in enumerate((first, second)):
            start = time.process_time()
            function()
            best[number] = min(best[number], time.process_time() - start)
    return best[0] / best[1]


def kernels_of_step(stage: str) -> int:
    """How many kernels a step of the tiny model starts."""
    batch_of, advance = ours.make_parts(workload.MODELS["tiny"], None, stage, 1024)
    batch = batch_of(0)
    advance(0, batch)
    watch = profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None)
    watch.start()
    advance(1, batch)
    watch.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watch.export(str(path), format="json")
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("cat") == "DygraphKernelLaunch" for event in events)


def forward_and_backward(function: Callable[..., paddle.Tensor], *inputs: paddle.Tensor) -> Callable[[], None]:
    """`function` of inputs that all want a gradient."""
    for tensor in inputs:
        tensor.stop_gradient = False

    def run() -> None:
        function(*inputs).sum().backward()
        for tensor in inputs:
            tensor.clear_gradient()

    return run


def step_over_products() -> float:
    """A step of the small model over the time that its products alone would take."""
    config = workload.MODELS["small"]
    batch_of, advance = ours.make_parts(config, None, "sft", 512)
    batch = batch_of(0)
    a, b = paddle.rand([512, 512]), paddle.rand([512, 1536])
    products = model_flops(ModelConfig.from_json(config), "sft", batch) / (2 * 512 * 512 * 1536)
    repeats = 40

    def multiply() -> None:
        for _ in range(repeats):
            paddle.matmul(a, b)

    return in_turn(lambda: advance(0, batch), multiply) * repeats / products


def norm_over_plain() -> float:
    x, weight = paddle.rand([1024, 512]), paddle.rand([512])
    plain = forward_and_backward(lambda x, w: x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w, x, weight)
    return in_turn(forward_and_backward(lambda x, w: rms_norm(x, w, 1e-5), x, weight), plain)


def swiglu_over_plain() -> float:
    gate, up = paddle.rand([1024, 1536]), paddle.rand([1024, 1536])
    plain = forward_and_backward(lambda gate, up: F.silu(gate) * up, gate, up)
    return in_turn(forward_and_backward(swiglu, gate, up), plain)


def documents_over_dense() -> float:
    """Attention over the documents of a pack of 1,024 by blocks, and with a dense mask."""
    indices = ours.packed(workload.pack(1024, 0, 8192)).startend_row_indices
    q, k, v = paddle.rand([1, 1024, 4, 64]), paddle.rand([1, 1024, 2, 64]), paddle.rand([1, 1024, 2, 64])
    plans = AttentionPlan.build(indices), AttentionPlan.build(indices, dense=True)
    blocks, dense = (
        forward_and_backward(lambda q, k, v, plan=plan: attention(q, k, v, plan), q, k, v) for plan in plans
    )
    return in_turn(blocks, dense)


def packing_over_sorting() -> float:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 50_000), 1, 4096).astype(np.int32)
    return in_turn(lambda: pack_greedy(lengths, 4096), lambda: [np.sort(lengths) for _ in range(50)], tries=3)


FIGURES: dict[str, Callable[[], float]] = {
    "kernels of a step, sft": lambda: kernels_of_step("sft"),
    "kernels of a step, lora": lambda: kernels_of_step("lora"),
    "kernels of a step, dpo": lambda: kernels_of_step("dpo"),
    "step over its products": step_over_products,
    "RMSNorm over plain operations": norm_over_plain,
    "SwiGLU over plain operations": swiglu_over_plain,
    "attention by documents over a dense mask": documents_over_dense,
    "packing over sorting 50 times": packing_over_sorting,
}


def processor_maker() -> str:
    """Return what the kernel says of the processor's maker, such as "GenuineIntel"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")


def recorded_figure(name: str, recorded: dict[str, Any]) -> float | None:
    """Return a count, or the ratio on processors of this maker; for an unknown maker the largest one."""
    if name.startswith("kernels"):
        return recorded["counts"].get(name)
    by_maker = {maker: ratios[name] for maker, ratios in recorded["ratios"].items() if name in ratios}
    return by_maker.get(processor_maker(), max(by_maker.values(), default=None))


def judge(name: str, found: float, recorded: dict[str, Any]) -> bool:
    """Print a figure next to the recorded one, and return whether it is within its limit."""
    before = recorded_figure(name, recorded)
    if before is None:
        print(f"{name}: {found:.4g}, nothing recorded")
        return False
    limit = before * (COUNT_MARGIN if name.startswith("kernels") else RATIO_MARGIN)
    word = "ok" if found <= limit else "WORSE"
    print(
        f"{name}: {found:.4g}, recorded {before:.4g} ({found / before - 1:+.0%}), limit {limit:.4g}: {word}", flush=True
    )
    return found <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    found = {name: float(f"{figure():.4g}") for name, figure in FIGURES.items()}
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if args.record:
        recorded["counts"] = {name: value for name, value in found.items() if name.startswith("kernels")}
        recorded["ratios"][processor_maker()] = {n: value for n, value in found.items() if n not in recorded["counts"]}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        return 0
    verdicts = [judge(name, value, recorded) for name, value in found.items()]  # all of them are printed
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
