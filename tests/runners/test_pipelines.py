"""`erniekit train` in stages of a pipeline: losses and weights as in one process, wherever the stack is cut."""

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

pytestmark = pytest.mark.distributed
COMMON = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_grad_norm": 0.5}


@pytest.fixture
def train_ranks(train_on_ranks: Callable[..., SimpleNamespace]) -> Callable[..., SimpleNamespace]:
    return lambda **parameters: train_on_ranks(**{**COMMON, **parameters})


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def test_two_stages_train_as_one_process_and_go_on_from_their_checkpoint(
    train: Callable[..., Any], train_ranks: Callable[..., SimpleNamespace], records: Path
) -> None:
    parameters = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "do_eval": True, "eval_steps": 2}
    parameters |= {"eval_dataset_path": str(records), "max_evaluate_steps": 5, "hidden_dropout_prob": 0.1}
    parameters |= {"eval_answers": 3}
    alone = train(**COMMON, **parameters)
    staged = train_ranks(**parameters, pipeline_parallel_degree=2)
    np.testing.assert_allclose(staged.losses, alone.losses, atol=1e-5)
    found, expected = weights(staged.output), weights(alone.output)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4, err_msg=name)
    evaluations = [json.loads((run.output / "eval_results.json").read_text()) for run in (staged, alone)]
    assert evaluations[0]["eval_loss"] == pytest.approx(evaluations[1]["eval_loss"], abs=1e-5)
    answers = [(run.output / "eval_samples.jsonl").read_text() for run in (staged, alone)]
    assert answers[0] == answers[1] and answers[0].count("\n") == 3

    shutil.rmtree(staged.output / "checkpoint-4")
    for path in staged.output.glob("model*"):
        path.unlink()
    again = train_ranks(**parameters, pipeline_parallel_degree=2, resume_from_checkpoint=True)
    for name, values in weights(again.output).items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)


CUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pp_seg_method": (
        {"pipeline_parallel_degree": 2, "pp_seg_method": [0, 1]},
        ["the embedding", "layers 0-1, norm and head"],
    ),
    "add_tail_layers": (
        {"pipeline_parallel_degree": 2, "add_tail_layers": 2},
        ["the embedding, layers 0-1", "norm and head"],
    ),
    "virtual_pp_degree": (
        {"pipeline_parallel_degree": 3, "virtual_pp_degree": 2, "add_tail_layers": 4},
        ["the embedding, layers 0", "layers 1", "norm and head"],
    ),
}


@pytest.mark.proves("pipeline_parallel_degree", "pp_seg_method", "virtual_pp_degree", "add_tail_layers")
@pytest.mark.parametrize("parameter", CUTS)
def test_the_stack_is_cut_where_it_is_asked_to_be(
    parameter: str, train: Callable[..., Any], train_ranks: Callable[..., SimpleNamespace]
) -> None:
    asked, parts = CUTS[parameter]
    staged = train_ranks(max_steps=2, **asked)
    for said, part in zip(staged.said, parts, strict=True):
        assert f"pipeline parallel: {part}\n" in said
    np.testing.assert_allclose(staged.losses, train(max_steps=2, **COMMON).losses, atol=1e-5)


@pytest.mark.proves("pipeline_parallel_config")
def test_words_of_the_pipeline_reach_it_and_change_no_loss(
    train: Callable[..., Any], train_ranks: Callable[..., SimpleNamespace]
) -> None:
    """fleet prints the time of every phase where it is asked to."""
    words = "enable_timer disable_p2p_cache_shape disable_batch_p2p_comm enable_clear_every_step_cache"
    plain = train_ranks(max_steps=2, pipeline_parallel_degree=2)
    worded = train_ranks(max_steps=2, pipeline_parallel_degree=2, pipeline_parallel_config=words)
    assert "backward_step" in worded.said[0] and "backward_step" not in plain.said[0]
    expected = train(max_steps=2, **COMMON).losses
    np.testing.assert_allclose(plain.losses, expected, atol=1e-5)
    np.testing.assert_allclose(worded.losses, expected, atol=1e-5)
