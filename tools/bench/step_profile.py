"""Where our own training step goes, and how near it is to what the processor can do.

    OMP_NUM_THREADS=2 python tools/bench/step_profile.py [--models tiny small medium] [--length 4096] [--stage sft]
        [--dtype float32 | bfloat16] [--steps 4]

Prints for each model the share of every part of a step, forward and backward together, from Paddle's own profiler: the
time inside kernels by what they serve, and what is left between kernels, which is Python and autograd. Then the rate
of the step in GF/s (the products that the documents and labels need, nothing else) over the best rates of a float32
and of a bfloat16 product with the same threads, measured in the same run: the model FLOPs utilisation. `--dtype
bfloat16` is `bf16: true`, which computes in float32 where the processor is faster in it. With one thread all rates are
of processor time, which a busy machine disturbs less; the shares are of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))
import ours
import paddle
import workload
from paddle import profiler
from product_rates import product_rates

from erniekit.data.batch import Batch
from erniekit.model import bf16, block_attention, head, mlp, native_attention, norm, rope
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.native import library

PARTS = {  # the innermost event that encloses a kernel and is named here says what the kernel serves
    "Linear": "linear layers",
    "MatmulGradNode": "linear layers",
    "_Linear": "linear layers",
    "BlockAttention": "attention",
    "_NativeAttention": "attention",
    "_RMSNormFunction": "RMSNorm",
    "_NativeRMSNorm": "RMSNorm",
    "_ApplyRotary": "rotary embedding",
    "_NativeRotary": "rotary embedding",
    "_NormRotary": "rotary embedding",
    "_SwiGLU": "SwiGLU",
    "_NativeActivation": "SwiGLU",
    "_FusedHeadLoss": "head and loss",
    "_CrossEntropy": "head and loss",
    "_LogProbabilities": "head and loss",
    "Head": "head and loss",
    "Optimization Step": "AdamW",
    "batch": "batch",
    "Gate": "router and dispatch",
    "MoE": "router and dispatch",
    "_SpreadRows": "router and dispatch",
    "_SumRows": "router and dispatch",
    "_Split": "router and dispatch",
    "_Join": "router and dispatch",
    "Embedding": "embedding",
    "EmbeddingGradNode": "embedding",
    "step": "sums, norm of the gradient, rest",
}
NATIVE = "native "  # begins the names of the native kernels' events
OURS = (
    block_attention.BlockAttention,
    native_attention._NativeAttention,
    norm._RMSNormFunction,
    norm._NativeRMSNorm,
    rope._ApplyRotary,
    rope._NativeRotary,
    rope._NormRotary,
    mlp._SwiGLU,
    mlp._NativeActivation,
    head._FusedHeadLoss,
    bf16._Linear,
)


def name_forwards(functions: Iterable[type]) -> None:
    """Let the profiler see the forward passes of our autograd functions; it sees their backward passes by itself."""
    for function in functions:
        function.forward = staticmethod(_named(function.__name__, function.forward))  # type: ignore[attr-defined]


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any) -> Any:
        with profiler.RecordEvent(name):
            return function(*arguments)

    return named


def name_native_kernels() -> None:
    """Let the profiler see the native kernels; to it a call through ctypes is nothing."""
    find = library.function

    def found(name: str, arguments: str) -> Any:
        kernel = find(name, arguments)
        return None if kernel is None else _named(NATIVE + name, kernel)

    library.function = found


def part_of(event: str) -> str | None:
    """What the name of an event stands for; None for one that says nothing."""
    name = event.partition("[")[0].removeprefix("Local_").removeprefix("Global_").removeprefix("GradNodePyLayer_")
    return PARTS.get(name)


def seconds_by_part(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds inside of kernels by part, and the time of steps outside of any as "between kernels".

    Of the thread that makes the steps: while others compute beside it (`model/threads.py`), so does it.
    """
    thread = next(_thread(event) for event in events if event["name"].startswith("step["))
    spans = [
        (float(e["ts"]), float(e["dur"]), e["name"], e["cat"])
        for e in events
        if e.get("ph") == "X" and _thread(e) == thread
    ]
    spans.sort(key=lambda span: (span[0], -span[1]))
    seconds: dict[str, float] = defaultdict(float)
    open_parts: list[tuple[float, str]] = []  # end, part
    total = kernels = 0.0
    for start, duration, name, category in spans:
        while open_parts and open_parts[-1][0] <= start:
            open_parts.pop()
        if category == "DygraphKernelLaunch" or name.startswith(NATIVE):
            if open_parts:  # the other kernels are of what comes between steps
                seconds[open_parts[-1][1]] += duration / 1e6
                kernels += duration / 1e6
        elif (part := part_of(name)) is not None:
            open_parts.append((start + duration, part))
            if name.startswith("step["):
                total += duration / 1e6
            elif name.startswith("batch["):  # NumPy: no kernels in it
                seconds[part] += duration / 1e6
                kernels += duration / 1e6
    return {**seconds, "between kernels": total - kernels}


def _thread(event: dict[str, Any]) -> str:
    """Its number, which Paddle writes with the language of the event: "17(C++)", "17(Python)"."""
    return str(event["tid"]).partition("(")[0]


def clock_for(threads: str) -> Callable[[], float]:
    """Seconds of the processor where one thread uses it, else of the wall."""
    return time.process_time if threads == "1" else time.perf_counter


def best_product_rate(clock: Callable[[], float], repeats: int = 5) -> float:
    """GF/s of the fastest float32 product among some square and oblong ones."""
    best = 0.0
    for rows, inner, columns in ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 768, 3072), (4096, 512, 1536)):
        a, b = paddle.rand([rows, inner]), paddle.rand([inner, columns])
        for _ in range(repeats):
            start = clock()
            paddle.matmul(a, b)
            best = max(best, 2 * rows * inner * columns / (clock() - start) / 1e9)
    return best


def model_flops(config: ModelConfig, stage: str, batch: Batch) -> float:
    """Floating-point operations of the products of a step: 2 forward and 4 backward for each weight and token (2 where
    weights are frozen), the visible pairs of attention, and the head where there is a label."""
    per_token = per_label = 0
    for name, shape in config.weight_shapes().items():
        if len(shape) != 2:
            continue
        if name == "lm_head.weight" or (config.tie_word_embeddings and "embed_tokens" in name):
            per_label += int(np.prod(shape))
        elif "embed_tokens" not in name:
            share = config.moe_k / config.moe_num_experts if ".experts." in name else 1.0
            per_token += int(np.prod(shape) * share)
    ends = batch.document_ends.astype(np.int64)
    visible = int((ends - np.arange(ends.shape[1]))[batch.is_token].sum())
    scores = config.num_hidden_layers * config.num_attention_heads * config.head_dim * visible
    weights = per_token * batch.token_count + per_label * batch.target_count
    return (4 if stage == "lora" else 6) * weights + 12 * scores


def profile(name: str, args: argparse.Namespace) -> None:
    batch_of, advance = ours.make_parts(workload.MODELS[name], None, args.stage, args.length, args.dtype)
    for number in range(2):
        advance(number, batch_of(number))
    seconds, rates, clock = [], [], clock_for(args.threads)
    config = ModelConfig.from_json(workload.MODELS[name])
    for number in range(2, 2 + args.steps):
        start = clock()
        batch = batch_of(number)
        advance(number, batch)
        seconds.append(clock() - start)
        rates.append(model_flops(config, args.stage, batch) / seconds[-1] / 1e9)
    peaks = product_rates(sys.executable, "paddle", (int(args.threads),))[args.threads]
    peaks["float32"] = max(peaks["float32"], best_product_rate(clock))

    watch = profiler.Profiler(targets=[profiler.ProfilerTarget.CPU], on_trace_ready=lambda _: None)
    with watch:
        for number in range(2 + args.steps, 2 + 2 * args.steps):
            with profiler.RecordEvent("step"):
                with profiler.RecordEvent("batch"):
                    batch = batch_of(number)
                advance(number, batch)
            watch.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watch.export(str(path), format="json")
        events = json.loads(path.read_text())["traceEvents"]
    parts = seconds_by_part(events)
    total = sum(parts.values())
    rate, median = statistics.median(rates), statistics.median(seconds)
    print(f"\n{name}, {args.stage}, {args.length:,} tokens, {args.threads} threads: {median:.3f} s a step, "
          f"{args.length / median:,.0f} tokens/s; {rate:,.0f} GF/s: MFU "
          + ", ".join(f"{rate / peak:.0%} of {peak:,.0f} in {dtype}" for dtype, peak in peaks.items()))  # fmt: skip
    print("| part | share of the step |\n|---|---:|")
    for part, value in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"| {part} | {value / total:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=workload.MODELS, default=["tiny", "small", "medium"])
    parser.add_argument("--length", type=int, default=4096, help="tokens a step")
    parser.add_argument("--stage", choices=("sft", "lora"), default="sft")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    args.threads = os.environ["OMP_NUM_THREADS"]
    name_forwards(OURS)
    name_native_kernels()
    for name in args.models:
        profile(name, args)


if __name__ == "__main__":
    main()
