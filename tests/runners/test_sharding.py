"""`erniekit train` on ranks that divide optimizer states, gradients or parameters: as in one process, and resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed
COMMON = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_grad_norm": 0.5}
SHARDED = {**COMMON, "gradient_accumulation_steps": 2, "sharding_parallel_degree": 2}
STAGES: dict[str, dict[str, Any]] = {
    "stage1": {"sharding": "stage1"},
    "stage1 split": {"sharding": "stage1", "sharding_parallel_config": "split_param enable_release_grads"},
    "stage1 fused": {"sharding": "stage1", "sharding_parallel_config": "enable_stage1_tensor_fusion"},
    "stage2": {"sharding": "stage2"},
    "stage3": {"sharding": "stage3"},
}


def tensors(folder: Path, pattern: str) -> dict[str, np.ndarray]:
    return {name: values for file in folder.glob(pattern) for name, values in load_file(file).items()}


@pytest.mark.proves("sharding_parallel_degree", "sharding")
@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        stage if stage in ("stage1 split", "stage3") else pytest.param(stage, marks=pytest.mark.exhaustive)
        for stage in STAGES
    ],
)
def test_ranks_train_as_one_process_and_go_on_from_their_checkpoint(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace], records: Path, stage: str
) -> None:
    parameters = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "do_eval": True, "eval_steps": 2}
    parameters |= {"eval_dataset_path": str(records), "max_evaluate_steps": 5, "weight_decay": 0.1}
    alone = train(**COMMON, **parameters)
    divided = train_on_ranks(**SHARDED, **STAGES[stage], **parameters)
    np.testing.assert_allclose(divided.losses, alone.losses, atol=1e-5)
    evaluations = [json.loads((run.output / "eval_results.json").read_text()) for run in (divided, alone)]
    assert evaluations[0]["eval_loss"] == pytest.approx(evaluations[1]["eval_loss"], abs=1e-5)
    expected = tensors(alone.output, "model*.safetensors")
    found = tensors(divided.output, "model*.safetensors")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4, err_msg=name)
    state, state_alone = (tensors(run.output / "checkpoint-2", "optimizer*.safetensors") for run in (divided, alone))
    assert {name: values.shape for name, values in state.items()} == {
        name: values.shape for name, values in state_alone.items()
    }

    shutil.rmtree(divided.output / "checkpoint-4")
    for path in divided.output.glob("model*"):
        path.unlink()
    again = train_on_ranks(**SHARDED, **STAGES[stage], **parameters, resume_from_checkpoint=True)
    for name, values in tensors(again.output, "model*.safetensors").items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)


@pytest.mark.slow
def test_a_stage_may_have_no_adapters_to_divide(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace], tiny_base: Path
) -> None:
    parameters = {"max_steps": 2, "model_name_or_path": str(tiny_base), "continue_training": True}
    parameters |= {"fine_tuning": "LoRA", "lora_target_modules": "model.layers.0.*", "learning_rate": 0.01}
    divided = train_on_ranks(**SHARDED, **STAGES["stage1"], **parameters, pipeline_parallel_degree=2)
    np.testing.assert_allclose(divided.losses, train(**COMMON, **parameters).losses, atol=1e-5)


@pytest.mark.slow
def test_answers_are_written_while_parameters_are_divided(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace], records: Path
) -> None:
    parameters = {"max_steps": 2, "do_eval": True, "eval_steps": 2, "eval_dataset_path": str(records)}
    parameters |= {"max_evaluate_steps": 2, "eval_answers": 3}
    runs = [train(**COMMON, **parameters), train_on_ranks(**SHARDED, **STAGES["stage3"], **parameters)]
    answers = [json.loads((run.output / "eval_results.json").read_text()) for run in runs]
    figures = [{name: found[name] for name in ("eval_rouge1", "eval_bleu", "eval_exact_match")} for found in answers]
    assert figures[1] == figures[0]


@pytest.mark.slow
def test_any_layout_goes_on_from_a_checkpoint_of_another(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace]
) -> None:
    """Checkpoints are whole, whatever divided what they hold."""
    parameters = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    divided = train_on_ranks(**SHARDED, **STAGES["stage3"], **parameters)
    shutil.rmtree(divided.output / "checkpoint-3")
    alone = train(**COMMON, **parameters, output_dir=str(divided.output), resume_from_checkpoint=True)
    assert alone.losses[-1] == pytest.approx(divided.losses[-1], abs=1e-5)
    for stage in ("stage1 split", "stage3"):
        shutil.rmtree(divided.output / "checkpoint-3")
        again = train_on_ranks(**SHARDED, **STAGES[stage], **parameters, resume_from_checkpoint=True)
        assert again.losses[-1] == pytest.approx(divided.losses[-1], abs=1e-5)


OTHERS: dict[str, dict[str, Any]] = {
    "tensor slices": {"tensor_parallel_degree": 2, "tensor_parallel_config": "sync_param sync_grad sync_moment"},
    "pipeline": {"pipeline_parallel_degree": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["stage1", "stage1 split", "stage1 fused"])
@pytest.mark.parametrize("other", OTHERS)
def test_beside_other_parallelism(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace], other: str, stage: str
) -> None:
    parameters = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
    alone = train(**COMMON, **parameters)
    divided = train_on_ranks(**SHARDED, **STAGES[stage], **OTHERS[other], **parameters)
    np.testing.assert_allclose(divided.losses, alone.losses, atol=1e-5)
    shutil.rmtree(divided.output / "checkpoint-4")
    again = train_on_ranks(**SHARDED, **STAGES[stage], **OTHERS[other], **parameters, resume_from_checkpoint=True)
    assert again.losses == divided.losses


REFERENCES: dict[str, dict[str, Any]] = {
    "a copy that follows": {"ref_model_update_steps": 2},
    "adapters put aside": {"lora": True, "lora_rank": 4},
    "adapters that follow": {"lora": True, "lora_rank": 4, "ref_model_update_steps": 2},
    "over the step": {"loss_type": "kto_pair", "beta": 0.5},
    "heads by rows": {"use_sparse_head_and_loss_fn": True},
    "PiSSA": {"lora": True, "lora_rank": 4, "lora_init": "pissa"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["stage1 split", "stage2", "stage3"])
@pytest.mark.parametrize("reference", REFERENCES)
def test_references_of_preferences_read_what_ranks_divide(
    train: Callable[..., Any],
    train_on_ranks: Callable[..., SimpleNamespace],
    tiny_base: Path,
    reference: str,
    stage: str,
) -> None:
    """Also resumed, from what the checkpoint has of the reference."""
    parameters = {"stage": "DPO", "model_name_or_path": str(tiny_base), "continue_training": True, "max_steps": 5}
    parameters |= {"train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl"), **REFERENCES[reference]}
    parameters |= {"save_strategy": "steps", "save_steps": 3}
    alone = train(**COMMON, **parameters)
    divided = train_on_ranks(**SHARDED, **STAGES[stage], **parameters)
    np.testing.assert_allclose(divided.losses, alone.losses, atol=1e-5)
    shutil.rmtree(divided.output / "checkpoint-5")
    again = train_on_ranks(**SHARDED, **STAGES[stage], **parameters, resume_from_checkpoint=True)
    assert again.losses[-1] == divided.losses[-1]
