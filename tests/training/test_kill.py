"""`kill -9` at random moments, saving included, always leaves a folder from which the run goes on to the same end."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from erniekit.training.callbacks.files import read_log
from erniekit.training.checkpoint.atomic_folder import newest_complete, remove_leftovers, step_of
from tests.distributed.warm_processes import start

ROOT = Path(__file__).parents[2]
KILLS = 20
MAX_STEPS = 100  # so many that twenty kills come before the end
SHIPPED = Path("examples/models/tiny-ernie")
Parameters = Mapping[str, Any]


def command(output_dir: Path, parameters: Parameters) -> list[str]:
    settings = {
        "output_dir": output_dir,
        "data_cache_dir": output_dir.parent / "cache",
        "train_dataset_path": "examples/data/sft-eval.jsonl",
        "max_steps": MAX_STEPS,
        "max_seq_len": 96,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "logging_steps": 1,
        "eval_steps": 5,
        "max_evaluate_steps": 1,
        "save_steps": 2,
        "save_total_limit": 2,
        "warmup_steps": 4,
        "report_to": "none",
        "overwrite_output_dir": "false",
        "resume_from_checkpoint": "true",
        **parameters,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return [
        sys.executable,
        "-m",
        "tests.training.announced_run",
        "train",
        "examples/configs/quickstart/sft.yaml",
        *overrides,
    ]


def run_and_kill(output_dir: Path, after_lines: int, parameters: Parameters) -> bool:
    """Start the run and kill it when it has printed so many lines of progress. Whether it was still running."""
    process = start(
        command(output_dir, parameters), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen, lines = 0, []
    for line in io.TextIOWrapper(process.stdout, encoding="utf-8"):
        lines.append(line)
        seen += line.startswith(("disk", "step ", "saved", "evaluation", "resuming"))
        if seen == after_lines:
            process.kill()
    code = process.wait()
    assert code in (0, -9), "".join(lines[-30:])
    return code == -9


def half_written(output_dir: Path) -> list[Path]:
    """What is left of a save, or of a removal after it, that did not come to its end."""
    return [*output_dir.glob(".writing-*"), *output_dir.glob(".deleting-*")]


def comparable_log(output_dir: Path) -> list[dict]:
    timed = ("tokens_per_second", "eval_seconds")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in read_log(output_dir / "training_log.jsonl")
    ]


def kill_and_compare(folder: Path, kills: int, parameters: Parameters, weights: str = "model.safetensors") -> int:
    """Compare a run with one that is killed so many times: the log and the weights, to the bit.

    Returns:
        How many kills fell into saving.
    """
    whole, killed = folder / "whole", folder / "killed"
    assert not run_and_kill(whole, -1, parameters)
    moments = random.Random(20)
    newest_step = during_save = 0
    for _ in range(kills):
        assert run_and_kill(killed, moments.randint(1, 60), parameters), "the run came to its end before all kills"
        during_save += bool(half_written(killed))
        newest, skipped = newest_complete(killed)
        assert skipped == []
        assert step_of(newest) >= newest_step if newest else newest_step == 0
        newest_step = step_of(newest) if newest else 0
    assert newest_step > 0
    assert not run_and_kill(killed, -1, parameters)
    assert remove_leftovers(killed) == []
    assert comparable_log(killed) == comparable_log(whole)
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    return during_save


@pytest.mark.slow
def test_twenty_kills_and_the_same_model_in_the_end(tmp_path: Path) -> None:
    assert kill_and_compare(tmp_path, KILLS, {}) >= 3


def base_of_adapters(folder: Path) -> Parameters:
    """Adapters with everything that is drawn or stored beside the factors."""
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.builder import build_model
    from erniekit.model.weights import save_model_folder

    tokenizer_files = [SHIPPED / "tokenizer.json", SHIPPED / "tokenizer_config.json"]
    save_model_folder(build_model(ModelConfig.from_folder(SHIPPED), None, seed=3), folder, tokenizer_files)
    values = {"lora": "true", "lora_dropout": 0.1, "dora": "true", "lora_init": "pissa", "lora_plus_scale": 4}
    return {**values, "model_name_or_path": folder, "continue_training": "true", "recompute": "true"}


def experts(folder: Path) -> Parameters:
    """Experts whose correction bias moves at every step, and a prediction layer."""
    shutil.copytree(SHIPPED, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}
    config |= {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    values = {"moe_router_bias_update_rate": 0.01, "moe_aux_loss_lambda": 0.01, "num_nextn_predict_layers": 1}
    return {**values, "model_name_or_path": folder, "recompute": "true"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_kills_of_a_run_that_saves_beside_training(tmp_path: Path) -> None:
    """The writer that a killed run leaves comes to its end, or nothing of it is seen; the next run waits for it."""
    kill_and_compare(tmp_path, 4, {"unified_checkpoint_config": "async_save"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "weights"),
    [
        pytest.param(base_of_adapters, "adapter_model.safetensors", id="adapters"),
        pytest.param(experts, "model.safetensors", id="experts", marks=pytest.mark.exhaustive),
    ],
)
def test_kills_of_runs_with_more_to_remember(
    prepare: Callable[[Path], Parameters], weights: str, tmp_path: Path
) -> None:
    kill_and_compare(tmp_path, 4, {**prepare(tmp_path / "model"), "max_steps": 24}, weights)
