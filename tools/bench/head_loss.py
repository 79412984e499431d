"""Time and memory of head and loss: plain, sparse (only positions with labels) and fused (in chunks).

    python tools/bench/head_loss.py [--tokens 4096] [--vocabulary 103424] [--hidden 1024] [--targets 0.3]
                                    [--log-probabilities]

The defaults are ERNIE-4.5-0.3B's head over a pack of 4,096 tokens of which 30% are targets. Every figure comes from a
fresh process: forward and backward, gradients of hidden states and head included; "peak" is how far resident memory
rose above its level before the first call. Prints a markdown table. With --log-probabilities, what preference training
takes: the log-probability of every target, whose gradient is known only after all of them.
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
VARIANTS = {
    "plain": {},
    "sparse": {"sparse": True},
    "fused": {"fused": True},
}


def measure(variant: str, args: argparse.Namespace) -> dict[str, float]:
    sys.path.insert(0, str(ROOT))
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder
    from erniekit.model.head import token_log_probabilities, token_loss

    config = ModelConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=8,
        num_hidden_layers=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    decoder = Decoder(config)
    rng = np.random.default_rng(0)
    weight = decoder.embedding.weight
    weight.set_value(rng.standard_normal((args.vocabulary, args.hidden), np.float32) * np.float32(0.02))
    hidden = paddle.to_tensor(rng.standard_normal((1, args.tokens, args.hidden), np.float32), stop_gradient=False)
    labels = rng.integers(0, args.vocabulary, (1, args.tokens))
    labels[rng.random((1, args.tokens)) >= args.targets] = -100
    labels = paddle.to_tensor(labels)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        if args.log_probabilities:
            loss = -token_log_probabilities(decoder, hidden, labels, **VARIANTS[variant]).values.sum()
        else:
            loss = token_loss(decoder, hidden, labels, **VARIANTS[variant]).loss_sum
        loss.backward()
        seconds.append(time.perf_counter() - start)
        decoder.clear_gradients(set_to_zero=False)
        hidden.clear_gradient(set_to_zero=False)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": min(seconds), "peak_mb": peak, "loss": float(loss) / int((labels != -100).sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=103424)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--targets", type=float, default=0.3, help="share of positions with a label")
    parser.add_argument("--log-probabilities", action="store_true", help="instead of the summed loss")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print("ANSWER " + json.dumps(measure(args.measure, args)))
        return
    gradient = args.vocabulary * args.hidden * 4 / 2**20
    print(f"The gradient of the head alone takes {gradient:,.0f} MB.\n")
    print("| head | seconds | peak, MB | mean loss |")
    print("|---|---|---|---|")
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", variant]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        answer = json.loads(done.stdout.split("ANSWER ")[1])
        print(f"| {variant} | {answer['seconds']:.2f} | {answer['peak_mb']:,.0f} | {answer['loss']:.5f} |", flush=True)


if __name__ == "__main__":
    main()
