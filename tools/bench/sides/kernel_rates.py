"""The kernels of a training step one at a time, forward and backward: their time, work and least traffic; and what the
machine does at best. Answers every line with the seconds of a call of each kernel, and the machine's rates."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import ours
import paddle
import workload
from step_profile import best_product_rate, clock_for

from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.rope_scaling import rotary_frequencies
from erniekit.model.attention import AttentionPlan, attention
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.head import token_loss
from erniekit.model.linear import Linear
from erniekit.model.mlp import swiglu
from erniekit.model.norm import RMSNorm
from erniekit.model.rope import apply_rotary, rotary_tables
from erniekit.training.optim.adamw import build_optimizer

CALL_SECONDS = 0.1  # a figure is the mean of as many calls as take this long together
MEMORY_MB, CACHE_KB = 128, 128  # of each of the three arrays of a triad, for a thread


@dataclass(frozen=True)
class Kernel:
    """`flops` counts the arithmetic of the formulas, an exponential as one; `bytes` what has to be read and written at
    least, were everything in between kept in registers."""

    name: str
    run: Callable[[], object]
    flops: float
    bytes: float


def values(*shape: int) -> paddle.Tensor:
    tensor = paddle.randn(shape)
    tensor.stop_gradient = False
    return tensor


def both_ways(function: Callable[..., paddle.Tensor], *inputs: paddle.Tensor) -> Callable[[], None]:
    gradient = paddle.randn(function(*inputs).shape)

    def run() -> None:
        function(*inputs).backward(gradient)
        for tensor in inputs:
            tensor.clear_gradient(set_to_zero=False)

    return run


def linears(config: ModelConfig, tokens: int) -> Kernel:
    """Those of a layer; their gradients by input and weight are products of the same size."""
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), (hidden, inner), (hidden, inner)]
    shapes.append((inner, hidden))
    layers = [Linear(*shape) for shape in shapes]
    calls = [both_ways(layer, values(tokens, layer.weight.shape[0])) for layer in layers]

    def run() -> None:
        for layer, call in zip(layers, calls, strict=True):
            call()
            layer.weight.clear_gradient(set_to_zero=False)

    flops = sum(6 * tokens * a * b for a, b in shapes)
    return Kernel("linear layers", run, flops, sum(3 * 4 * (tokens * (a + b) + a * b) for a, b in shapes))


def attention_kernel(config: ModelConfig, batch: Batch, tokens: int) -> Kernel:
    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    plan = AttentionPlan.build(batch.startend_row_indices)
    inputs = [values(1, tokens, count, size) for count in (heads, keys, keys)]
    pairs = int((batch.document_ends - np.arange(tokens)).sum())
    run = both_ways(lambda q, k, v: attention(q, k, v, plan), *inputs)
    return Kernel("attention", run, 12 * heads * size * pairs, 6 * 4 * tokens * (heads + keys) * size)


def head(config: ModelConfig, batch: Batch, tokens: int) -> Kernel:
    decoder = Decoder(replace(config, num_hidden_layers=0))
    hidden, labels = values(1, tokens, config.hidden_size), paddle.to_tensor(batch.labels)
    weights = config.vocab_size * config.hidden_size

    def run() -> None:
        token_loss(decoder, hidden, labels, fused=True).loss_sum.backward()
        decoder.clear_gradients(set_to_zero=False)
        hidden.clear_gradient(set_to_zero=False)

    traffic = 4 * (2 * weights + 2 * batch.target_count * config.hidden_size)
    return Kernel("head and loss", run, 6 * batch.target_count * weights, traffic)


def elementwise(config: ModelConfig, batch: Batch, tokens: int) -> list[Kernel]:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    norm = RMSNorm(hidden, config.rms_norm_eps)
    tables = rotary_tables(paddle.to_tensor(batch.position_ids), heads, rotary_frequencies(config), interleaved=True)
    runs = {  # with the width of a row, operations a number, and numbers moved for each
        "RMSNorm": (both_ways(norm, values(tokens, hidden)), hidden, 13, 5),
        "SwiGLU": (both_ways(swiglu, values(tokens, inner), values(tokens, inner)), inner, 17, 8),
        "rotary embedding": (
            both_ways(lambda x: apply_rotary(x, tables), values(tokens, heads, config.head_dim)),
            heads * config.head_dim, 6, 8,
        ),
    }  # fmt: skip
    return [
        Kernel(name, run, flops * tokens * width, 4 * moved * tokens * width)
        for name, (run, width, flops, moved) in runs.items()
    ]


def adamw(config: ModelConfig) -> Kernel:
    """Of the whole model: weight, gradient and two moments are read, three of them written."""
    model = build_model(config, None)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.01))
    for parameter in parameters.values():
        (parameter * 1e-3).sum().backward()
    count = sum(parameter.size for parameter in parameters.values())
    return Kernel("AdamW", optimizer.step, 14 * count, 7 * 4 * count)


def triad_rate(threads: int, numbers: int) -> float:
    """GB/s of c = a + b in NumPy, `numbers` float32 a thread; what is written is counted once."""
    arrays = [[np.ones(numbers, np.float32) for _ in range(3)] for _ in range(threads)]
    calls = max(1, (64 << 20) // numbers)

    def add(own: list[np.ndarray]) -> None:
        for _ in range(calls):
            np.add(own[0], own[1], out=own[2])

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(4):
            start = time.perf_counter()
            list(pool.map(add, arrays))
            best = max(best, 12 * numbers * threads * calls / (time.perf_counter() - start) / 1e9)
    return best


def seconds_of(run: Callable[[], object], clock: Callable[[], float]) -> float:
    calls, start = 0, clock()
    while (spent := clock() - start) < CALL_SECONDS or not calls:
        run()
        calls += 1
    return spent / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=workload.MODELS, required=True)
    parser.add_argument("--length", type=int, required=True)
    args = parser.parse_args()
    config, threads = ModelConfig.from_json(workload.MODELS[args.model]), os.environ["OMP_NUM_THREADS"]
    clock = clock_for(threads)
    batch = ours.packed(workload.pack(args.length, 0, config.vocab_size))
    kernels = [linears(config, args.length), attention_kernel(config, batch, args.length)]
    kernels += [head(config, batch, args.length), *elementwise(config, batch, args.length), adamw(config)]
    for kernel in kernels:
        kernel.run()
    for _ in sys.stdin:
        machine = {
            "product": best_product_rate(clock),
            "memory": triad_rate(int(threads), MEMORY_MB << 18),
            "cache": triad_rate(int(threads), CACHE_KB << 8),
        }
        found = [[kernel.name, kernel.flops, kernel.bytes, seconds_of(kernel.run, clock)] for kernel in kernels]
        print("\nANSWER " + json.dumps({"machine": machine, "kernels": found}), flush=True)


if __name__ == "__main__":
    main()
