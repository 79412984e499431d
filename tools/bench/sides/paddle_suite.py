"""paddleformers-cli 1.2.0 and erniekit 1.0.1: their own `train` command, in this process, held at every step.

They read text, so that the documents become words of one token each; what counts is what reaches the model, without
padding. Random weights of the same shapes. Both get the MKL setting that erniekit applies by itself.
"""

from __future__ import annotations

import os

os.environ["MKL_DEBUG_CPU_TYPE"] = "7"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import sentencepiece
import workload
import yaml
from turns import Gate

STEPS = 400
WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstvz"]  # 200 of them, each one token
SPECIAL = ["<|begin_of_sentence|>", "<|end_of_sentence|>", *(f"<mask:{number}>" for number in range(1, 8))]
IS_PADDLEFORMERS = importlib.util.find_spec("ernie") is None

SHARED: dict[str, Any] = {
    "train_dataset_type": "erniekit", "eval_dataset_type": "erniekit", "train_dataset_prob": "1.0",
    "eval_dataset_prob": "1.0", "continue_training": False, "seed": 23, "do_train": True, "do_eval": False,
    "device": "cpu", "dataloader_num_workers": 0, "max_steps": STEPS, "evaluation_strategy": "no",
    "save_strategy": "no", "logging_steps": 1, "gradient_accumulation_steps": 1, "overwrite_output_dir": True,
    "disable_tqdm": True, "warmup_steps": 0, "learning_rate": 1e-4, "weight_decay": 0.01, "report_to": "none",
    "fp16_opt_level": "O1", "amp_master_grad": False, "num_samples_each_epoch": 4000,
}  # fmt: skip
OF_PADDLEFORMERS: dict[str, Any] = {
    "packing": True, "mix_strategy": "concat", "template": "ernie_nothink", "_attn_implementation": "sdpa",
    "per_device_train_batch_size": 1, "bf16": False,
}  # fmt: skip
OF_ERNIEKIT: dict[str, Any] = {
    "moe_group": "dummy", "fuse_rope": False, "fuse_rms_norm": False, "fuse_swiglu": False, "fuse_linear": False,
    "use_flash_attention": False, "use_sparse_flash_attn": False, "use_attn_mask_start_row_indices": False,
    "use_sparse_head_and_loss_fn": False, "distributed_dataloader": False, "batch_size": 1, "compute_type": "bf16",
    "lr_scheduler_type": "constant", "disable_ckpt_quant": True, "unified_checkpoint": True,
}  # fmt: skip


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """config.json and a SentencePiece tokenizer that knows the words."""
    folder.mkdir()
    own = {"fuse_rms_norm": False, "scale_qk_coeff": 1.0, "dtype": "float32"}
    config = {name: value for name, value in {**config, **own}.items() if name != "torch_dtype"}  # says: torch's layout
    (folder / "config.json").write_text(json.dumps(config))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 50),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=len(WORDS) + 200,
        model_type="bpe",
        hard_vocab_limit=False,
        byte_fallback=False,
        user_defined_symbols=SPECIAL,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
        minloglevel=2,
    )  # fmt: skip
    settings = {
        "tokenizer_class": "Ernie4_5Tokenizer" if IS_PADDLEFORMERS else "Ernie4_5_Tokenizer",
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>",
        "cls_token": SPECIAL[0], "sep_token": SPECIAL[1], "mask_token": SPECIAL[2],
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def text(ids: np.ndarray) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in ids)


def write_data(path: Path, stage: str, length: int, vocabulary: int) -> None:
    """The documents, or pairs, of the first steps as records."""
    lines = []
    for step in range(40):
        if stage == "dpo":
            for prompt, chosen, rejected in workload.pairs(length, step, vocabulary):
                record = {
                    "src": [text(prompt)],
                    "tgt": [],
                    "response": [[text(chosen)], [text(rejected)]],
                    "sort": [1, 0],
                }
                lines.append(json.dumps(record))
            continue
        for document in workload.pack(length, step, vocabulary):
            cut = max(1, int(len(document) * workload.PROMPT_SHARE))
            lines.append(json.dumps({"src": [text(document[:cut])], "tgt": [text(document[cut:])]}))
    path.write_text("\n".join(lines) + "\n")


def hold(gate: Gate) -> None:
    """Make every trainer of the suite wait for its turn, and tell what it works on."""
    from paddleformers.trainer import Trainer, TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                gate.passed(float(logs["loss"]))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            gate.saw(int((inputs["input_ids"].numpy() != 0).sum()))  # 0 is <unk>, with which both pad
            return function(self, model, inputs, *rest, **more)

        return training_step

    def with_turns(function: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *arguments: Any, **more: Any) -> None:  # noqa: N807
            function(self, *arguments, **more)
            self.add_callback(Turns())

        return __init__

    Trainer.training_step = watched(Trainer.training_step)
    Trainer.__init__ = with_turns(Trainer.__init__)


def run(settings: Any) -> None:
    config = workload.read_config(settings.folder)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "model", config)
        write_data(folder / "data.jsonl", settings.stage, settings.length, config["vocab_size"])
        values = SHARED | (OF_PADDLEFORMERS if IS_PADDLEFORMERS else OF_ERNIEKIT)
        adapters = settings.stage == "lora" or (IS_PADDLEFORMERS and settings.stage == "dpo")
        full, low_rank = ("full", "lora") if IS_PADDLEFORMERS else ("Full", "LoRA")
        values |= {
            "stage": "DPO" if settings.stage == "dpo" else "SFT",
            "fine_tuning": low_rank if adapters else full,
            "max_seq_len": settings.length,
            "model_name_or_path": str(folder / "model"),
            "train_dataset_path": str(folder / "data.jsonl"),
            "eval_dataset_path": str(folder / "data.jsonl"),
            "logging_dir": str(folder / "log"),
            "output_dir": str(folder / "output"),
        }
        if adapters:
            values["lora_rank"] = workload.LORA_RANK
        if settings.stage == "dpo" and not IS_PADDLEFORMERS:
            values["max_prompt_len"] = settings.length // 3
        path = folder / "train.yaml"
        path.write_text(yaml.safe_dump(values))
        os.chdir(folder)
        sys.argv = [sys.argv[0], "train", str(path)]
        hold(Gate())
        if IS_PADDLEFORMERS:
            from paddleformers.cli.train.tuner import run_tuner
        else:
            from erniekit.train.tuner import run_tuner
        run_tuner()


if __name__ == "__main__":
    run(workload.arguments())
