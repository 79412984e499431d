"""trl's GRPOTrainer, a step whenever it is asked for; its generation, loss and optimizer are its own."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from rollouts_reward import letters
from turns import Gate

gate = Gate()
rewards: list[float] = []


class Timed(trl.GRPOTrainer):  # type: ignore[misc]
    """Tells how long generation takes, and its tokens."""

    def _generate_single_turn(self, *args: Any, **more: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate_single_turn(*args, **more)
        gate.saw(sum(map(len, found[0])), sampling=time.perf_counter() - started, answers=len(found[0]))
        return found

    def _calculate_rewards(self, *args: Any, **more: Any) -> Any:
        found = super()._calculate_rewards(*args, **more)
        rewards.append(float(found.mean()))
        return found


class Turns(transformers.TrainerCallback):
    """Waits before every step until it is asked for."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        gate.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        gate.passed(rewards[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="a model with its tokenizer, and prompts.jsonl")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True, help="of a step")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--longest", type=int, required=True)
    parser.add_argument("--continuous", action="store_true", help="transformers' continuous batching")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(options.folder / "tokenizer.json"), eos_token="</s>", pad_token="<unk>"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.folder, attn_implementation="sdpa", dtype=torch.float32
    )
    lines = (options.folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    settings = trl.GRPOConfig(
        str(options.output), max_steps=100_000, per_device_train_batch_size=options.answers,
        num_generations=options.group, max_completion_length=options.longest, temperature=1.0, beta=0.0,
        loss_type="grpo", epsilon=0.2, num_iterations=1, steps_per_generation=1, learning_rate=1e-6,
        lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
        optim="adamw_torch_fused", log_completions=False,
        use_transformers_continuous_batching=options.continuous,
    )  # fmt: skip
    trainer = Timed(
        model=model,
        reward_funcs=letters,
        args=settings,
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
