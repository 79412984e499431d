"""transformers' Qwen2-Audio as its documentation uses it: processor, model, loss; fused AdamW, no trainer.

A thread makes the next batch while the model works on the last, as ours does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import audio_workload as workload
import soundfile
import torch
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration
from turns import Step, ahead, serve

PROMPT = "Transcribe the audio."


def conversation(record: dict[str, str], *, answered: bool) -> list[dict[str, Any]]:
    parts = [{"type": "audio", "audio": record["audio_path"]}, {"type": "text", "text": PROMPT}]
    answer = [{"role": "assistant", "content": record["text"]}] if answered else []
    return [{"role": "user", "content": parts}, *answer]


def inputs_of(processor: Any, chosen: list[dict[str, str]], *, answered: bool) -> tuple[dict[str, Any], int]:
    """What the processor makes of some records, and the samples of their sound."""
    sounds = [soundfile.read(record["audio_path"], dtype="float32")[0] for record in chosen]
    texts = [
        processor.apply_chat_template(
            conversation(record, answered=answered), add_generation_prompt=not answered, tokenize=False
        )
        for record in chosen
    ]
    side = "right" if answered else "left"
    inputs = processor(
        text=texts, audio=sounds, sampling_rate=workload.RATE, padding=True, padding_side=side, return_tensors="pt"
    )
    kept = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    return kept, sum(map(len, sounds))


def with_labels(processor: Any, inputs: dict[str, Any], chosen: list[dict[str, str]]) -> dict[str, Any]:
    """Only the transcript and its end are asked for."""
    labels = torch.full_like(inputs["input_ids"], -100)
    lengths = inputs["attention_mask"].sum(1).tolist()
    for row, (record, length) in enumerate(zip(chosen, lengths, strict=True)):
        answer = len(processor.tokenizer(record["text"])["input_ids"]) + 1
        end = length - 1  # the line break of the template behind the end token
        labels[row, end - answer : end] = inputs["input_ids"][row, end - answer : end]
    return inputs | {"labels": labels}


def make_step(folder: Path, task: str, batch: int) -> Step:
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa")
    found = workload.records(folder)

    def make(number: int) -> tuple[dict[str, Any], int]:
        chosen = [found[index] for index in workload.batch_numbers(number, batch, len(found))]
        inputs, samples = inputs_of(processor, chosen, answered=task == "train")
        return (with_labels(processor, inputs, chosen) if task == "train" else inputs), samples

    source = ahead(make)
    if task == "transcribe":
        model.eval()

        @torch.inference_mode()
        def write_down(_: int) -> tuple[float, int]:
            inputs, samples = next(source)
            answers = model.generate(**inputs, max_new_tokens=workload.NEW_TOKENS, do_sample=False)
            texts = processor.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            return workload.fingerprint([text.strip() for text in texts]), samples

        return write_down
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01, fused=True)

    def step(_: int) -> tuple[float, int]:
        inputs, samples = next(source)
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), samples

    return step


if __name__ == "__main__":
    settings = workload.arguments()
    torch.set_num_threads(settings.threads)
    serve(make_step(settings.folder, settings.task, settings.batch))
