"""trl's SFTTrainer and DPOTrainer, given the batches of a benchmark; their loop, loss and optimizer are their own.

For preferences they pad two rows a pair, the prompt in both; the reference is a frozen copy, without adapters.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import datasets
import torch
import transformers
import trl
import workload
from torch_loop import batches, open_model
from trl.trainer.dpo_trainer import DataCollatorForPreference
from turns import Gate

PREPARED = 400  # steps in the data set; more than any run makes


def pair_batch(length: int, step: int, vocabulary: int) -> tuple[dict[str, Any], int]:
    """The pairs of a step as trl's own collator lays them out, and their tokens with each prompt counted once."""
    drawn = workload.pairs(length, step, vocabulary)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    examples = [{name: part.tolist() for name, part in zip(names, pair, strict=True)} for pair in drawn]
    collate = DataCollatorForPreference(pad_token_id=0)
    return collate.torch_call(examples), sum(len(part) for pair in drawn for part in pair)


def with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """The trainer counts tokens by a mask or by positions, and wants one of them."""
    if "position_ids" in batch:
        return batch
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}  # documents hold no 0


class Turns(transformers.TrainerCallback):
    """Waits before every step until it is asked for."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.gate.wait()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.gate.passed(float(logs["loss"]))


def trainer_of(kind: type, gate: Gate, prepared: list[tuple[dict[str, Any], int]]) -> type:
    """The trainer with batches that are there already, one for each row of its data set."""

    class Prepared(kind):  # type: ignore[misc,valid-type]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            gate.saw(prepared[self.state.global_step][1])
            return super().training_step(model, inputs, *rest, **more)

    return Prepared


def run(settings: Any) -> None:
    folder, length = settings.folder, settings.length
    vocabulary = workload.read_config(folder)["vocab_size"]
    bf16 = settings.dtype == "bfloat16"
    gate = Gate()
    if settings.stage == "dpo":
        prepared = [pair_batch(length, step, vocabulary) for step in range(PREPARED)]
    else:
        source = itertools.islice(batches(settings.batching, length, vocabulary), PREPARED)
        prepared = [(with_mask(batch), tokens) for batch, tokens in source]
    rows = {"step": list(range(PREPARED)), "input_ids": [[0]] * PREPARED, "labels": [[0]] * PREPARED}
    common: dict[str, Any] = {
        "max_steps": PREPARED, "per_device_train_batch_size": 1, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "bf16": bf16, "disable_tqdm": True, "optim": "adamw_torch_fused", "max_length": None,
        "gradient_checkpointing": False, "remove_unused_columns": False,
    }  # fmt: skip
    words = _any_tokenizer()
    with tempfile.TemporaryDirectory() as output:
        shared = {
            "model": open_model(folder, settings.stage),
            "train_dataset": datasets.Dataset.from_dict(rows),
            "processing_class": words,
            "data_collator": lambda examples: prepared[examples[0]["step"]][0],
            "callbacks": [Turns(gate)],
        }
        if settings.stage == "dpo":
            trainer = trainer_of(trl.DPOTrainer, gate, prepared)(
                args=trl.DPOConfig(output, beta=0.1, disable_dropout=True, **common),
                ref_model=open_model(folder, "dpo"),
                **shared,
            )
        else:
            trainer = trainer_of(trl.SFTTrainer, gate, prepared)(
                args=trl.SFTConfig(output, dataset_kwargs={"skip_prepare_dataset": True}, **common), **shared
            )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def _any_tokenizer() -> Any:
    """The trainers want one, and only pad with it."""
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


if __name__ == "__main__":
    given = workload.arguments()
    torch.set_num_threads(given.threads)
    run(given)
