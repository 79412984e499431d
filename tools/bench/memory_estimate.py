"""The memory that `erniekit validate` estimates, beside what runs take: small models, two steps, one process or ranks.

    python tools/bench/memory_estimate.py [NAME ...] [--list | --write]

Each run is `erniekit train` in processes of its own. "tensors" is the peak that Paddle's allocator counts; "process" is
the peak of resident memory (VmHWM), which holds Python, libraries and gaps as well. Of several ranks the one that takes
most is compared with the stage that should. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import whole_run
from marked import ESTIMATES, with_table

from erniekit.config import Config
from erniekit.distributed.topology import topology_from

LENGTH = 1024
DENSE = {
    "model_type": "ernie4_5",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
EXPERTS = DENSE | {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 768,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}
RUN = whole_run.BASE | {
    "stage": "SFT",
    "max_seq_len": LENGTH,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "use_fused_head_and_loss_fn": True,
}
LORA = {"lora": True, "lora_rank": 8}
AGAIN = {"recompute": True}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4}
# name -> model, tokens of a sample, parameters
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "all weights": (DENSE, 128, {}),
    "all weights, one sample a row": (DENSE, LENGTH, {"packing": False}),
    "all weights, whole logits": (DENSE, 128, {"use_fused_head_and_loss_fn": False}),
    "all weights, recompute": (DENSE, 128, AGAIN),
    "LoRA": (DENSE, 128, LORA),
    "LoRA with dropout": (DENSE, 128, LORA | {"lora_dropout": 0.1}),
    "LoRA, recompute": (DENSE, 128, LORA | AGAIN),
    "LoRA, recompute, one sample a row": (DENSE, LENGTH, LORA | AGAIN | {"packing": False}),
    "experts": (EXPERTS, 128, {}),
    "experts, LoRA, recompute": (EXPERTS, 128, LORA | AGAIN),
    "tp2": (DENSE, 128, TENSOR | {"sequence_parallel": False}),
    "tp2 + sp": (DENSE, 128, TENSOR),
    "pp2": (DENSE, 128, PIPELINE),
    "pp2, recompute": (DENSE, 128, PIPELINE | AGAIN),
    "sharding stage 1 x 2": (DENSE, 128, {"sharding": "stage1", "sharding_parallel_degree": 2}),
    "sharding stage 2 x 2": (DENSE, 128, {"sharding": "stage2", "sharding_parallel_degree": 2}),
    "sharding stage 3 x 2": (DENSE, 128, {"sharding": "stage3", "sharding_parallel_degree": 2}),
    "dp2": (DENSE, 128, {"ranks": 2}),
    "tp2 x pp2, LoRA": (DENSE, 128, TENSOR | PIPELINE | LORA),
    "experts, ep2 over mp": (EXPERTS, 128, TENSOR | {"moe_group": "mp"}),
}


class Peak(NamedTuple):
    """Bytes of the rank that takes most."""

    measured: int
    estimated: int

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


def measure(name: str, folder: Path) -> tuple[int, Peak, Peak]:
    """Run a case: its number of ranks, the peak of tensors, and of whole processes."""
    shape, sample, parameters = CASES[name]
    parameters = dict(parameters)
    ranks = parameters.pop("ranks", None)
    model_folder = whole_run.write_model(shape, folder)
    data = write_data(sample, folder / f"data-{sample}.jsonl")
    values = RUN | {
        "model_name_or_path": str(model_folder),
        "train_dataset_path": str(data),
        "output_dir": str(folder / "out"),
        "data_cache_dir": str(folder / "cache"),
        **parameters,
    }
    peaks, estimated = whole_run.run(values, folder, ranks), whole_run.estimated(values, ranks)
    world_size = topology_from(Config.from_mapping(values), ranks).world_size
    return world_size, *(Peak(getattr(peaks, kind), estimated[kind]) for kind in ("tensors", "process"))


def write_data(tokens: int, path: Path) -> Path:
    """Samples of about so many tokens: the shipped tokenizer has one for each digit."""
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(40_000 // tokens + 20):
            digits = "".join(draw.choices("0123456789", k=tokens - 20))
            file.write(json.dumps({"src": [digits[: tokens // 2]], "tgt": [digits[tokens // 2 :]]}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the runs; default all of them")
    parser.add_argument("--write", action="store_true", help="put the table into docs/layout-estimates.md")
    parser.add_argument("--list", action="store_true", help="show the names")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return
    lines = [
        "| run | ranks | tensors: measured, MB | estimated | error | process: measured, MB | estimated | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or CASES:
            ranks, *peaks = measure(name, Path(folder))
            cells = [name, str(ranks)]
            for peak in peaks:
                cells += [f"{peak.measured / 1e6:,.0f}", f"{peak.estimated / 1e6:,.0f}", f"{peak.error:+.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if arguments.write:
        ESTIMATES.write_text(with_table("memory", "\n".join(lines), ESTIMATES), encoding="utf-8")


if __name__ == "__main__":
    main()
