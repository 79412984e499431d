"""What weights in few bits and FP8 products cost: memory, error and time of training adapters beside them.

    python tools/bench/quantization.py [--layers 8] [--hidden 512] [--vocabulary 8192] [--length 1024] [--repeats 3]

Writes a model folder with random weights, and for each `weight_quantize_algo` builds the model with adapters in a
process of its own, trains one step after another on one row of random tokens, and prints a markdown table: bytes of
linear weights, their squared error relative to their square, the process's peak of memory above that with Paddle
imported (adapters, activations and embedding included), once loaded and after training, and the fastest step. The last
rows train all weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rounds import counted

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CASES = [("none", True), ("weight_only_int8", True), ("weight_only_int4", True), ("nf4", True), ("fp8_linear", True)]
CASES += [("none", False), ("fp8_linear", False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-quantization"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options, *json.loads(options.case))))
        return
    write_model(options)
    columns = ["weights", "trained", "linear weights, MB", "relative error", "peak, loaded, MB", "peak, trained, MB"]
    print(f"| {' | '.join(columns)} | step, s |\n{'|---' * 7}|")
    for algorithm, lora in counted(CASES, "quantization", "cases"):
        words = [sys.executable, __file__, *sys.argv[1:], "--case", json.dumps([algorithm, lora])]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        error = f"{found['error']:.1e}" if found["error"] else "0"
        print(
            f"| {algorithm} | {'adapters' if lora else 'all'} | {found['bytes'] / 1e6:.1f} | {error} | "
            f"{found['loaded'] / 1e6:,.0f} | {found['peak'] / 1e6:,.0f} | {found['seconds']:.2f} |",
            flush=True,
        )
    shutil.rmtree(options.folder)


def write_model(options: argparse.Namespace) -> None:
    from erniekit.environment import import_paddle

    import_paddle()
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder

    config = ModelConfig.from_json(
        {
            "model_type": "ernie4_5",
            "vocab_size": options.vocabulary,
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 128,
            "num_key_value_heads": 2,
            "head_dim": 128,
        }
    )
    shutil.rmtree(options.folder, ignore_errors=True)
    save_model_folder(build_model(config, None, seed=0), options.folder)


def measure(options: argparse.Namespace, algorithm: str, lora: bool) -> dict[str, float]:
    from erniekit.environment import import_paddle

    import_paddle()
    import paddle

    from erniekit.config.sections.training import TrainingParameters
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.lora.config import LoraSettings
    from erniekit.model.lora.lora import named_trainable_parameters
    from erniekit.model.quantization.settings import WEIGHT_ONLY, Fp8, WeightOnly
    from erniekit.training.optim.adamw import build_optimizer

    paddle.matmul(paddle.ones([64, 64]), paddle.ones([64, 64]))
    before = peak()
    config = ModelConfig.from_folder(options.folder)
    forms = {name: WeightOnly(name) for name in WEIGHT_ONLY} | {"fp8_linear": Fp8()}
    settings = LoraSettings(rank=8, alpha=16.0) if lora else None
    decoder = build_model(config, options.folder, lora=settings, quantization=forms.get(algorithm))
    loaded = peak() - before
    parameters = named_trainable_parameters(decoder)
    optimizer = build_optimizer(parameters, TrainingParameters())
    seconds = [step(options, decoder, optimizer, number) for number in range(1 + options.repeats)]
    found = {"loaded": loaded, "peak": peak() - before, "seconds": min(seconds[1:])}
    return found | weights(decoder, options.folder)


def step(options: argparse.Namespace, decoder: Any, optimizer: Any, number: int) -> float:
    import time

    import numpy as np
    import paddle

    from erniekit.model.attention import AttentionPlan
    from erniekit.model.head import token_loss

    started = time.perf_counter()
    ids = paddle.to_tensor(np.random.default_rng(number).integers(0, options.vocabulary, (1, options.length)))
    plan = AttentionPlan.build(np.full((1, 1, options.length, 1), options.length, np.int32))
    decoder.begin_micro_batch(step=number, micro_batch=0)
    loss = token_loss(decoder, decoder(ids, paddle.arange(options.length).unsqueeze(0), plan), ids)
    (loss.loss_sum / options.length).backward()
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
    decoder.end_step()
    return time.perf_counter() - started


def weights(decoder: Any, folder: Path) -> dict[str, float]:
    """Bytes of linear weights while they wait, and the error of what is multiplied."""
    import numpy as np

    from erniekit.model.quantization.float8 import hadamard_rotate
    from erniekit.model.storage.layouts import open_weights
    from erniekit.model.weights import named_linears, packed_weights

    stored, packed = open_weights(decoder.config, folder), packed_weights(decoder)
    squared, wrong, size = 0.0, 0.0, 0
    for path, linear in named_linears(decoder).items():
        name = f"{path}.weight"
        if name in packed:
            size, before, after = size + packed[name].nbytes, stored.read(name), packed[name].dense().numpy()
        else:
            size, before = size + 4 * linear.weight.size, linear.weight.numpy().T
            product = linear.product  # trained since: its own rounding of what it is now
            block = product.shared.settings.hadamard_block if product else 0
            after = hadamard_rotate(product.weight_codes(linear).decoded(), block).numpy() if product else before
        squared += float(np.square(before).sum())
        wrong += float(np.square(before - after).sum())
    return {"bytes": size, "error": wrong / squared}


def peak() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
