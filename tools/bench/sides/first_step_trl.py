"""trl's SFTTrainer up to its first step, on prompts and completions, packed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from stages import last, mark


class First(transformers.TrainerCallback):
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        mark("data")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            last("first step", float(logs["loss"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="config.json, tokenizer.json and records.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mark("imports")
    folder = options.folder
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", pad_token="<unk>"
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    mark("model")
    records = datasets.load_dataset(
        "json", data_files=str(folder / "records.jsonl"), split="train", cache_dir=str(options.cache)
    )
    settings = trl.SFTConfig(
        str(options.output), max_steps=1, per_device_train_batch_size=2, max_length=512, packing=True,
        learning_rate=3e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, optim="adamw_torch_fused",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=settings, train_dataset=records, processing_class=tokenizer, callbacks=[First()]
    )
    trainer.train()


if __name__ == "__main__":
    main()
