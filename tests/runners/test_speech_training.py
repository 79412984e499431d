"""Whole runs that train a model to speak, on shards of codes: what they leave, and that they go on bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from erniekit.build.text_reading import read_text_reading
from erniekit.config import Config
from erniekit.runners.evaluate import run_evaluation
from tests.runners.coded_speech import LEVELS, coded_speech

Train = Callable[..., Any]
OBJECTIVES = ("masked", "ar_nar")


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Parameters of a run over twelve recordings, six of whose 8 steps are in the first epoch."""
    return {
        "stage": "TTS",
        "train_dataset_path": str(coded_speech(tmp_path / "codes")),
        "train_dataset_type": "codes",
        "max_steps": 8,
        "prompt_seconds": "0.05,0.1",
        "save_strategy": "steps",
        "save_steps": 4,
    }


def of_objective(values: dict[str, Any], objective: str) -> dict[str, Any]:
    own = {name: value for name, value in values.items() if objective == "ar_nar" or name != "prompt_seconds"}
    return {**own, "tts_objective": objective}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_plain_model_learns_to_speak(train: Train, values: dict[str, Any], objective: str) -> None:
    run = train(**{**of_objective(values, objective), "max_steps": 30, "save_steps": 100})
    assert np.mean(run.losses[-5:]) < 0.8 * np.mean(run.losses[:5])
    assert f"codes: {LEVELS} levels of 8" in run.said and "objective: " in run.said
    last = run.log[-1] if "code_accuracy" in run.log[-1] else run.log[-2]
    assert 0 <= last["code_accuracy"] <= 1 and last["audio_seconds_per_second"] > 0
    config = json.loads((run.output / "config.json").read_text())
    assert config["model_type"] == {"masked": "omnivoice", "ar_nar": "vall_e"}[objective]
    assert config["num_audio_codebook"] == LEVELS
    reading = read_text_reading([run.output])
    assert reading is not None and reading.longest_prompt == (0.1 if objective == "ar_nar" else None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(train: Train, values: dict[str, Any], objective: str) -> None:
    """In the middle of an epoch, by other workers."""
    whole = train(**of_objective(values, objective))
    weights = load_file(whole.output / "model.safetensors")
    shutil.rmtree(whole.output / "checkpoint-8")
    resumed = train(**of_objective(values, objective), resume_from_checkpoint=True, dataloader_num_workers=2)
    assert resumed.losses[-4:] == whole.losses[-4:] and "bit-exact" not in resumed.said
    again = load_file(resumed.output / "model.safetensors")
    for name, value in weights.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_packing_and_accumulation_change_nothing(train: Train, values: dict[str, Any], objective: str) -> None:
    values = {**of_objective(values, objective), "max_steps": 3, "save_strategy": "no"}
    first = train(**values, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    second = train(**values, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    np.testing.assert_allclose(second.losses, first.losses, rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_evaluation_reads_the_same_codes_each_time(
    make_config: Callable[..., Config], values: dict[str, Any], objective: str, tmp_path: Path
) -> None:
    held_out = str(coded_speech(tmp_path / "held-out", 6, seed=1))
    own = {**of_objective(values, objective), "do_eval": True, "eval_dataset_path": held_out}
    config = make_config(**own, eval_dataset_type="codes", max_evaluate_steps=-1)
    first, second = run_evaluation(config), run_evaluation(config)
    assert first.record() | {"eval_seconds": 0} == second.record() | {"eval_seconds": 0}
    assert {"code_accuracy", "loss_0", "accuracy_0"} <= first.metrics.keys()


def test_a_codec_that_is_not_that_of_the_codes_is_told(train: Train, values: dict[str, Any], tmp_path: Path) -> None:
    data = Path(values["train_dataset_path"])
    codec = Path(shutil.copytree(data / "codec", tmp_path / "codec"))
    own = of_objective(values, "masked") | {"max_steps": 1, "save_strategy": "no", "codec": str(codec)}
    assert "codes of one codec are noise to another" not in train(**own).said
    weights = codec / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert f"codec: {codec} has other weights than" in train(**own).said
