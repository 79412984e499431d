"""Preference training of this project and of trl's DPOTrainer (torch), side by side in one run.

    python tools/bench/dpo.py [--torch-python PATH] [--threads 2] [--rounds 5] [--pairs 8] [--only equal]

Both sides load the same random ERNIE-4.5 weights, see the same pairs in the same order, and make the same step: the
reference's log-probabilities from a frozen copy, the sigmoid loss, backward, clipping to norm 1, AdamW. Ours packs each
prompt once with its two answers, several pairs a row; trl pads two rows a pair, with `use_logits_to_keep`. They are two
processes that take turns. The ratio of useful tokens a second is that of the pairs a second. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from workers import ROOT, Worker, answer, make_model, median_seconds, ratio_and_range, take_turns

MODEL = {
    "model_type": "ernie4_5",
    "architectures": ["Ernie4_5ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "use_bias": False,
}
ROW, RATE, BETA = 2048, 1e-4, 0.1
WORKLOADS = ("equal", "long prompt", "log-normal")


def lengths(workload: str, pairs: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of prompt, chosen and rejected answer: int [pairs, 3]."""
    if workload == "equal":
        return np.full((pairs, 3), 256)
    if workload == "long prompt":
        return np.tile([1024, 128, 128], (pairs, 1))
    return np.clip(rng.lognormal(np.log(150), 0.8, (pairs, 3)), 8, 640).astype(int)


def step_pairs(workload: str, pairs: int, step: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The pairs of a step, as token ids; the same on both sides."""
    rng = np.random.default_rng([WORKLOADS.index(workload), step])
    return [
        tuple(rng.integers(3, 8192, length).tolist() for length in row)  # type: ignore[misc]
        for row in lengths(workload, pairs, rng)
    ]


def serve(step_once: Any) -> None:
    """Answer every request line {steps} with a line {seconds, losses, peak_mb}."""
    number = 0
    for line in sys.stdin:
        losses, start = [], time.perf_counter()
        for _ in range(json.loads(line)["steps"]):
            losses.append(step_once(number))
            number += 1
        answer(start, losses)


def ours(folder: Path, workload: str, pairs: int) -> None:
    sys.path.insert(0, str(ROOT))
    from erniekit.environment import import_paddle

    import_paddle()

    from erniekit.data.batches import collate
    from erniekit.data.packing import pack_greedy
    from erniekit.data.pairs import Answer, join_pair
    from erniekit.model.builder import build_model
    from erniekit.model.configuration import ModelConfig
    from erniekit.model.weights import named_weights
    from erniekit.training.optimizer import OptimizerSettings, build_optimizer
    from erniekit.training.preference import answer_log_probabilities, measure_answers, preference
    from erniekit.training.preference_losses import PreferenceSettings
    from erniekit.training.reference import FrozenCopy
    from erniekit.training.step import train_step

    config = ModelConfig.from_folder(folder)
    model, copy = build_model(config, folder), build_model(config, folder)
    model.train()
    heads = {"fused_head": False, "sparse_head": True, "dense_mask": False}

    reference = FrozenCopy(copy, model, measure_answers(answer_log_probabilities(**heads)), updated=False)
    objective = preference(PreferenceSettings(loss_type="sigmoid", beta=BETA), reference, **heads)
    parameters = named_weights(model)
    optimizer = build_optimizer(parameters, OptimizerSettings(weight_decay=0.0))

    def step_once(number: int) -> float:
        samples = [
            join_pair(prompt, Answer(chosen, chosen), Answer(rejected, rejected))
            for prompt, chosen, rejected in step_pairs(workload, pairs, number)
        ]
        packs = pack_greedy(np.array([len(sample.input_ids) for sample in samples], np.int32), ROW)
        batches = [collate([[samples[i] for i in pack]], [pack.tolist()], 0, pairs=True) for pack in packs]
        result = train_step(
            model, list(parameters.values()), optimizer, objective, batches,
            step=number, learning_rate=RATE, max_grad_norm=1.0,
        )  # fmt: skip
        return result.totals.loss

    serve(step_once)


def theirs(folder: Path, workload: str, pairs: int) -> None:
    import datasets
    import torch
    import transformers
    import trl

    model = transformers.Ernie4_5ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    tokenizer = _any_tokenizer()
    rows = [pair for number in range(400) for pair in step_pairs(workload, pairs, number)]
    dataset = datasets.Dataset.from_dict(
        {
            "prompt_input_ids": [row[0] for row in rows],
            "chosen_input_ids": [row[1] for row in rows],
            "rejected_input_ids": [row[2] for row in rows],
        }
    )

    class Prepared(trl.DPOTrainer):
        """The same trainer, given token ids, in their order."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Turns(transformers.TrainerCallback):
        """Waits for a request before a step, and answers after its last one."""

        left, start = 0, 0.0

        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.left == 0:
                line = sys.stdin.readline()
                if not line:
                    os._exit(0)
                self.left, self.losses, self.start = json.loads(line)["steps"], [], time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" not in logs:
                return
            self.losses.append(logs["loss"])
            self.left -= 1
            if self.left == 0:
                answer(self.start, self.losses)

    with tempfile.TemporaryDirectory() as output:
        settings = trl.DPOConfig(
            output_dir=output, per_device_train_batch_size=pairs, max_steps=400, learning_rate=RATE, beta=BETA,
            lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
            report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, max_prompt_length=None, max_length=None,
            optim="adamw_torch_fused", use_logits_to_keep=True, gradient_checkpointing=False, disable_dropout=True,
        )  # fmt: skip
        trainer = Prepared(
            model=model,
            ref_model=transformers.Ernie4_5ForCausalLM.from_pretrained(folder, attn_implementation="sdpa"),
            args=settings,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[Turns()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


def _any_tokenizer() -> Any:
    """The trainer wants one; it only pads with it."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def compare(workload: str, folder: Path, args: argparse.Namespace) -> None:
    def start(python: str, side: str) -> Worker:
        command = [python, __file__, "--work", side, "--folder", str(folder), "--only", workload]
        return Worker([*command, "--pairs", str(args.pairs)], args.threads)

    workers = {"ours": start(sys.executable, "ours"), "theirs": start(args.torch_python, "theirs")}
    first = {side: worker.run(steps=3)["losses"] for side, worker in workers.items()}
    if not np.allclose(first["ours"], first["theirs"], atol=2e-3):  # trl rounds what it logs to four digits
        raise SystemExit(f"the two sides disagree on the loss: {first}")
    answers = take_turns(workers, args.rounds, steps=args.steps)
    tokens = sum(
        len(part)
        for step in range(3, 3 + args.steps)
        for pair in step_pairs(workload, args.pairs, step)
        for part in pair
    )
    speed = {side: tokens / median_seconds(listed) for side, listed in answers.items()}
    peaks = {side: listed[-1]["peak_mb"] for side, listed in answers.items()}
    print(
        f"| {workload} | {speed['ours']:,.0f} | {speed['theirs']:,.0f} | {ratio_and_range(answers)} "
        f"| {peaks['ours']:,.0f} / {peaks['theirs']:,.0f} | {peaks['ours'] / peaks['theirs']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch and trl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps a side makes before the other's turn")
    parser.add_argument("--pairs", type=int, default=8, help="pairs in a step")
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--work", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        (ours if args.work == "ours" else theirs)(args.folder, args.only, args.pairs)
        return
    print("| pairs | ours, tokens/s | trl, tokens/s | ratio (range) | peak MB, ours / trl | ratio |")
    print("|---|---:|---:|---|---|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        make_model(Path(temporary), MODEL)
        for workload in [args.only] if args.only else WORKLOADS:
            compare(workload, Path(temporary), args)


if __name__ == "__main__":
    main()
