"""The fastest plain loop over transformers' model (and peft's adapters) on torch: sdpa, fused AdamW, no trainer.

Packed: one row of documents, told apart by position ids that restart. Padded: documents of similar length, padded to
the longest. bfloat16 keeps the weights themselves in 16 bits, which is faster than mixed precision, and less exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import transformers
import workload
from turns import Step, serve

MEGABATCH = 16  # steps whose documents are grouped by length


def packed(documents: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """One row [1, S]; the first label of each document belongs to no position."""
    labels = [workload.labels_of(document) for document in documents]
    for label in labels:
        label[0] = workload.NO_LABEL
    row = {
        "input_ids": np.concatenate(documents),
        "labels": np.concatenate(labels),
        "position_ids": np.concatenate([np.arange(len(document)) for document in documents]),
    }
    batch = {name: torch.tensor(values)[None] for name, values in row.items()}
    if len(documents) == 1:
        del batch["position_ids"]  # keeps sdpa's causal fast path
    return batch


def padded(documents: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Rows [B, S] with padding behind, which causal attention never reads, so that no mask is needed."""
    longest = max(map(len, documents))
    ids = np.zeros((len(documents), longest), np.int64)
    labels = np.full_like(ids, workload.NO_LABEL)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = document
        labels[row, : len(document)] = workload.labels_of(document)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def batches(batching: str, length: int, vocabulary: int) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """The batches of a run without end, each with its useful tokens."""
    step = 0
    while True:
        if batching == "packed":
            documents = workload.pack(length, step, vocabulary)
            yield packed(documents), sum(map(len, documents))
            step += 1
            continue
        for documents in workload.padded_batches(length, step, MEGABATCH, vocabulary):
            yield padded(documents), sum(map(len, documents))
        step += MEGABATCH


def open_model(folder: Path, stage: str, dtype: str = "float32") -> Any:
    """The model, with adapters for stage "lora", and "wint8": beside linear layers of bitsandbytes."""
    quantized = {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)} if stage == "wint8" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=getattr(torch, dtype), **quantized
    )
    if stage in ("lora", "wint8"):
        import peft

        model = peft.get_peft_model(model, lora_settings())
    return model.train()


def lora_settings() -> Any:
    import peft

    return peft.LoraConfig(
        r=workload.LORA_RANK,
        lora_alpha=2 * workload.LORA_RANK,
        target_modules=list(workload.LORA_TARGETS),
        task_type="CAUSAL_LM",
    )


def make_step(folder: Path, stage: str, length: int, vocabulary: int, batching: str, dtype: str) -> Step:
    model = open_model(folder, stage, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=True)
    source = batches(batching, length, vocabulary)

    def step(_: int) -> tuple[float, int]:
        batch, tokens = next(source)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), tokens

    return step


if __name__ == "__main__":
    settings = workload.arguments()
    torch.set_num_threads(settings.threads)
    vocabulary = workload.read_config(settings.folder)["vocab_size"]
    serve(make_step(settings.folder, settings.stage, settings.length, vocabulary, settings.batching, settings.dtype))
