"""Write the example configurations of ERNIE-4.5's published models: one file for each model, method and length.

    python tools/quickstart/make_configs.py [--output examples/configs] [--check]

What differs between them is the table of layouts below, whose memory `erniekit validate FILE --world-size N` estimates;
everything else is the same decision made once. The quickstart's and other models' files are written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from generated import write_or_check

WIDTH = 120
LENGTHS = {"8k": 8192, "32k": 32768, "128k": 131072}
SCHEMA = "# yaml-language-server: $schema=../../../docs/parameters/erniekit.schema.json"


@dataclass(frozen=True)
class Layout:
    """Degrees, and comments of the file for choices that are not obvious."""

    tensor: int = 1
    pipeline: int = 1
    sharding: int = 1
    accumulation: int = 8
    tail: int = 0
    segments: tuple[int, ...] = ()
    master_grad: bool = True
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.sharding


FOURTEEN_STAGES = Layout(8, 14, tail=2, accumulation=56, notes={
    "add_tail_layers": "54 layers and 2 empty ones: 14 stages of 4, and 2 beside the head",
    "gradient_accumulation_steps": "4 x the stages: they wait 20% of a step",
})  # fmt: skip
ELEVEN_STAGES = Layout(8, 11, tail=1, accumulation=44, notes={
    "add_tail_layers": "54 layers and an empty one: 11 stages of 5; the last has 4 and the head, which costs one",
    "gradient_accumulation_steps": "4 x the stages: they wait 19% of a step",
})  # fmt: skip
LAYOUTS: dict[str, dict[str, dict[str, Layout]]] = {
    "0.3B": {
        "full": dict.fromkeys(LENGTHS, Layout()),
        "lora": dict.fromkeys(LENGTHS, Layout()),
    },
    "21B-A3B": {
        "full": {
            "8k": Layout(4, sharding=2),
            "32k": Layout(4, sharding=2),
            "128k": Layout(4, 2, accumulation=16, segments=(0, 16), notes={
                "pp_seg_method": "15 layers; 13 layers and the head, which costs as much as two",
                "pipeline_parallel_degree": "instead of sharding: activations of half the layers on each GPU",
                "gradient_accumulation_steps": "8 x the stages: they wait 7% of a step",
            }),
        },
        "lora": {"8k": Layout(), "32k": Layout(), "128k": Layout(2)},
        "wint48": {"8k": Layout(), "32k": Layout(), "128k": Layout(2)},
    },
    "300B-A47B": {
        "full": {
            "8k": ELEVEN_STAGES,
            "32k": FOURTEEN_STAGES,
            "128k": Layout(8, 14, 4, tail=2, accumulation=56, master_grad=False, notes={
                **FOURTEEN_STAGES.notes,
                "sharding_parallel_degree": "makes room for the activations of 128K tokens",
            }),
        },
        "lora": {
            "8k": Layout(8, 2, accumulation=16),
            "32k": Layout(8, 2, accumulation=16),
            "128k": Layout(8, 3, accumulation=24),
        },
        "wint48": {
            "8k": Layout(4),
            "32k": Layout(8),
            "128k": Layout(8, 2, accumulation=16),
        },
        "fp8": dict.fromkeys(("8k", "32k"), Layout(8, 4, segments=(0, 16, 29, 42), accumulation=16, notes={
            "pp_seg_method": "the first 3 of 54 layers have no experts, and the last stage has the head",
            "gradient_accumulation_steps": "4 x the stages: they wait 20% of a step",
        })),
    },
}  # fmt: skip
SUFFIXES = {"full": "", "lora": "-lora", "wint48": "-lora-wint48", "fp8": "-fp8"}
METHODS = {
    "full": "all weights of",
    "lora": "low-rank adapters beside",
    "wint48": "low-rank adapters beside 8-bit weights and 4-bit experts of",
    "fp8": "all weights through FP8 products of",
}


def files() -> Iterator[tuple[str, str]]:
    """Paths below the folder of configurations, and texts."""
    for size, methods in LAYOUTS.items():
        for method, lengths in methods.items():
            for stage in ("sft", "dpo") if method != "fp8" else ("sft",):
                for length, layout in lengths.items():
                    path = f"ernie-4.5-{size.lower()}/{stage}{SUFFIXES[method]}-{length}.yaml"
                    yield path, text(path, size, method, stage, length, layout)


def text(path: str, size: str, method: str, stage: str, length: str, layout: Layout) -> str:
    """One file."""
    adapters = method in ("lora", "wint48")
    what = "Preferences between two answers" if stage == "dpo" else "Supervised fine-tuning"
    where = "one GPU" if layout.ranks == 1 else f"{layout.ranks} GPUs"
    verb = "dpo" if stage == "dpo" else "train"
    lines = [
        SCHEMA,
        "#",
        f"# {what}: {METHODS[method]} ERNIE-4.5-{size};",
        f"# rows of {LENGTHS[length]:,} tokens, on {where} of 80 GB.",
        f"#   erniekit validate examples/configs/{path} --world-size {layout.ranks}",
        f"#   erniekit {verb} examples/configs/{path}",
        "# The first command needs no GPU: it says which rank holds what, and how much memory each one takes. Twice as",
        "# many GPUs read twice as many rows at once. Written by tools/quickstart/make_configs.py.",
        "",
        "# What to train",
        f"stage: {stage.upper()}",
        f"fine_tuning: {'LoRA' if adapters else 'Full'}",
        f"model_name_or_path: baidu/ERNIE-4.5-{size}-PT",
        "from_hf_hub: true",
        f"output_dir: output/{path.removesuffix('.yaml')}",
    ]
    if adapters:
        lines += [
            "",
            "# Adapters",
            "lora_rank: 32",
            _with("lora_alpha: 64", "the update is multiplied by alpha / rank"),
        ]
    if stage == "dpo":
        lines += [
            "",
            "# The loss",
            _with("loss_type: sigmoid", "or ipo, simpo, orpo, kto_pair, ...: docs/preference-training.md"),
            _with("beta: 0.1", "how strongly the model is held to the reference"),
        ]
    lines += ["", *_data(stage, length), "", *_schedule(stage, adapters, layout)]
    if layout.ranks > 1:
        lines += ["", *_layout(layout, experts="A" in size)]
    lines += ["", *_memory(method, layout)]
    lines += ["", "# Logs and checkpoints", "logging_steps: 1", "save_strategy: steps", "save_steps: 100"]
    return "\n".join([*lines, "save_total_limit: 2", ""])


def _data(stage: str, length: str) -> list[str]:
    kind = "preference" if stage == "dpo" else "sft"
    rows = "a prompt and both answers; several pairs share one row" if stage == "dpo" else ""
    lines = [
        "# Data: yours; the shipped file is there so that this file runs as it is",
        f"train_dataset_path: examples/data/{kind}-train.jsonl",
        "train_dataset_type: erniekit",
        _with(f"max_seq_len: {LENGTHS[length]}", rows),
    ]
    if stage == "dpo":
        lines.append(f"max_prompt_len: {LENGTHS[length] // 2}")
    return [
        *lines,
        _with("packing: true", "samples of a row never see each other; FlashMask skips what they do not see"),
    ]


def _schedule(stage: str, adapters: bool, layout: Layout) -> list[str]:
    rate = {("sft", False): "1.0e-5", ("sft", True): "3.0e-4", ("dpo", False): "1.0e-6", ("dpo", True): "1.0e-5"}
    note = "about ten times that of full fine-tuning is usual" if adapters else ""
    accumulation = f"gradient_accumulation_steps: {layout.accumulation}"
    return [
        "# Schedule",
        "num_train_epochs: 1",
        "per_device_train_batch_size: 1",
        _with(accumulation, layout.notes.get("gradient_accumulation_steps", "")),
        _with(f"learning_rate: {rate[stage, adapters]}", note),
        "lr_scheduler_type: cosine",
        "warmup_steps: 20",
        f"weight_decay: {'0.0' if stage == 'dpo' else '0.1'}",
    ]


def _layout(layout: Layout, *, experts: bool) -> list[str]:
    lines = ["# Layout"]
    values: dict[str, object] = {}
    if layout.tensor > 1:
        values["tensor_parallel_degree"] = layout.tensor
        values["sequence_parallel"] = "true"
        if experts:
            values["moe_group"] = "mp"
    if layout.pipeline > 1:
        values["pipeline_parallel_degree"] = layout.pipeline
    if layout.segments:
        values["pp_seg_method"] = list(layout.segments)
    if layout.tail:
        values["add_tail_layers"] = layout.tail
    if layout.sharding > 1:
        values |= {"sharding": "stage1", "sharding_parallel_degree": layout.sharding}
    notes = {
        "sequence_parallel": "activations between matrices once, not on every GPU",
        "moe_group": "experts divided between the GPUs of a tensor-parallel group",
        "sharding": "optimizer states divided between GPUs that read different rows",
        **layout.notes,
    }
    return lines + [_with(f"{name}: {value}", notes.get(name, "")) for name, value in values.items()]


def _memory(method: str, layout: Layout) -> list[str]:
    compute = {"wint48": "wint4/8", "fp8": "fp8"}.get(method, "bf16")
    lines = [
        "# Memory and number formats",
        f"compute_type: {compute}",
        _with("fp16_opt_level: O2", "16-bit weights, float32 copies of trained ones in the optimizer"),
    ]
    if layout.master_grad:
        lines.append(_with("amp_master_grad: true", "gradients are summed in float32"))
    lines += [
        _with("recompute: true", "a third more computation for most of the activations' memory"),
        _with("use_fused_head_and_loss_fn: true", "103,424 words: logits are never whole"),
    ]
    if method == "fp8":
        lines += [
            _with("use_lowprecision_moment: true", "AdamW remembers in bfloat16 what it can,"),
            _with("tensorwise_offload_optimizer: true", "and all of it in the memory of hosts: 2.4 TB"),
        ]
    return lines


def _with(line: str, note: str) -> str:
    """A line with its comment: beside it where that fits, else above it."""
    beside = f"{line:<36} # {note}"
    return line if not note else beside if len(beside) <= WIDTH else f"# {note}\n{line}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/configs"))
    parser.add_argument("--check", action="store_true", help="only check that the files are up to date")
    arguments = parser.parse_args()
    made = {arguments.output / path: content for path, content in files()}
    return write_or_check(made, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
