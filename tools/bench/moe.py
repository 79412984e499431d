"""Time of a layer of experts, forward and backward: tokens grouped by expert, every expert over every token, and torch.

    python tools/bench/moe.py [--tokens 1024] [--hidden 512] [--inner 384] [--experts 32] [--chosen 4] [--threads 2]

The defaults are a small ERNIE-4.5 mixture with one shared expert. "transformers" is `Ernie4_5_MoeSparseMoeBlock` with
the same weights, where torch and transformers are installed. The variants take turns in one process; the ratio is the
median over the rounds with its range. The outputs are compared before anything is timed. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[], np.ndarray]


def ours(settings: dict[str, object], x: np.ndarray) -> tuple[dict[str, Step], dict[str, np.ndarray]]:
    """The two ways of this project, and the weights under their Hugging Face names and in its layout."""
    sys.path.insert(0, str(ROOT))
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.moe.experts import MoE
    from erniekit.model.moe.router import NO_BALANCE_LOSSES, ExpertBalance

    layer = MoE(ModelConfig.from_json(settings), 0, ExpertBalance(NO_BALANCE_LOSSES))
    rng, stored = np.random.default_rng(0), {}
    for name, parameter in layer.named_parameters():
        values = rng.standard_normal(parameter.shape, np.float32) * np.float32(0.02)
        parameter.set_value(values)
        stored[name] = values.T if name.endswith("_proj.weight") else values

    def step(compute: Callable[[paddle.Tensor], paddle.Tensor]) -> np.ndarray:
        inputs = paddle.to_tensor(x, stop_gradient=False)
        output = compute(inputs)
        output.sum().backward()
        layer.clear_gradients(set_to_zero=False)
        return output.numpy()

    def every_expert(inputs: paddle.Tensor) -> paddle.Tensor:
        rows = inputs.reshape([-1, inputs.shape[-1]])
        routes, _ = layer.router(rows)
        return (layer._all_experts(rows, routes) + layer.shared_experts(rows)).reshape(inputs.shape)

    return {"grouped by expert": lambda: step(layer), "every expert": lambda: step(every_expert)}, stored


def transformers_block(settings: dict[str, object], x: np.ndarray, weights: dict[str, np.ndarray]) -> Step | None:
    """transformers' own layer with these weights; None where it is not installed."""
    try:
        import torch
        from transformers import Ernie4_5_MoeConfig
        from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
    except ImportError:
        return None
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    block = Ernie4_5_MoeSparseMoeBlock(Ernie4_5_MoeConfig(**settings))
    block.load_state_dict({name: torch.tensor(np.ascontiguousarray(values)) for name, values in weights.items()})

    def step() -> np.ndarray:
        inputs = torch.tensor(x, requires_grad=True)
        output = block(inputs)[0]
        output.sum().backward()
        block.zero_grad(set_to_none=True)
        return output.detach().numpy()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=384, help="channels of each expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4, help="experts of each token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    settings: dict[str, object] = {
        "model_type": "ernie4_5_moe",
        "vocab_size": 8,
        "hidden_size": args.hidden,
        "intermediate_size": args.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "moe_num_experts": args.experts,
        "moe_k": args.chosen,
        "moe_intermediate_size": args.inner,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    }
    x = np.random.default_rng(1).standard_normal((1, args.tokens, args.hidden), np.float32)
    variants, weights = ours(settings, x)
    theirs = transformers_block(settings, x, weights)
    if theirs is not None:
        variants["transformers"] = theirs
    outputs = {name: step() for name, step in variants.items()}
    for name, output in outputs.items():
        np.testing.assert_allclose(output, outputs["grouped by expert"], atol=1e-4, err_msg=name)

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    print(f"{args.tokens:,} tokens, {args.experts} experts of {args.hidden} x {args.inner}, {args.chosen} a token\n")
    print("| variant | tokens/s | time over ours (range) |")
    print("|---|---:|---|")
    for name, taken in seconds.items():
        ratios = [other / own for other, own in zip(taken, seconds["grouped by expert"], strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {name} | {args.tokens / statistics.median(taken):,.0f} | {shown} |")


if __name__ == "__main__":
    main()
