"""Weights in few bits and FP8 products on several ranks: as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.build.layout import plan_layout
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.quantization.fp8 import AVERAGES_FILE
from tests.tiny_runs import save_random_model

pytestmark = pytest.mark.distributed
Train = Callable[..., Any]
TENSOR = {"tensor_parallel_degree": 2, "sequence_parallel": False}
STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 8, "apply_online_actscale_step": 2}
ROWS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}  # of one process for two that read
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "sequence": {"tensor_parallel_degree": 2, "sequence_parallel": True},
    **{f"sharding {stage}": {"sharding": f"stage{stage}", "sharding_parallel_degree": 2} for stage in (1, 2, 3)},
    "experts by data": {"moe_group": "data"},
    "experts by tensor": {"moe_group": "mp", "tensor_parallel_degree": 2, "sequence_parallel": True},
}
IN_THE_PLAIN_RUN = {("sharding 3", "weight_only_mix"), ("experts by data", "fp8_linear")}


def _matrix() -> list[Any]:
    cases = [(layout, algorithm) for layout in LAYOUTS for algorithm in ("weight_only_mix", "nf4", "fp8_linear")]
    # groups of 32 of the tiny model's 32 inputs are not divided
    cases = [case for case in cases if "tensor_parallel_degree" not in LAYOUTS[case[0]] or case[1] != "nf4"]
    marks = {case: () if case in IN_THE_PLAIN_RUN else (pytest.mark.exhaustive,) for case in cases}
    return [pytest.param(*case, marks=marks[case], id=" ".join(case)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "algorithm"), _matrix())
def test_every_layout_trains_as_one_process_does(
    layout: str, algorithm: str, train: Train, train_on_ranks: Train, moe_model: Path, tmp_path: Path
) -> None:
    """Adapters beside a mixture of experts, and a run that goes on from a checkpoint of the ranks in one process."""
    base = save_random_model(moe_model, tmp_path / "base", seed=5)
    values: dict[str, Any] = {"lora": True, "model_name_or_path": str(base)}
    values |= {"continue_training": True, "weight_quantize_algo": algorithm, "max_steps": 4}
    values |= {"save_strategy": "steps", "save_steps": 2, "num_nextn_predict_layers": 1}
    if algorithm == "fp8_linear":
        values |= FP8
    if "tensor_parallel_degree" in LAYOUTS[layout]:
        rows, own_rows = {}, {}
        values |= {"hadamard_block_size": 4} if algorithm == "fp8_linear" else {}  # shared experts: 12 inputs a rank
    else:
        rows, own_rows = ROWS, {"per_device_train_batch_size": 1, "nproc": 2}
    divided, alone = train_on_ranks(**values, **own_rows, **LAYOUTS[layout]), train(**values, **rows)
    # what rounds to another code makes a difference that grows with every step
    near = {"rtol": 1e-3 if algorithm == "fp8_linear" else 1e-5}
    np.testing.assert_allclose(divided.losses, alone.losses, **near)
    checkpoint = str(divided.output / "checkpoint-2")
    resumed = train(**values, **rows, output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=checkpoint)
    np.testing.assert_allclose(resumed.losses, divided.losses[2:], **near)


@pytest.fixture
def adapters(tiny_base: Path) -> dict[str, Any]:
    return {"lora": True, "model_name_or_path": str(tiny_base), "continue_training": True}


@pytest.mark.parametrize(
    ("layout", "algorithm"), [(TENSOR, "weight_only_int8"), (STAGES, "nf4")], ids=["tensor", "pipeline"]
)
def test_adapters_train_as_in_one_process(
    layout: dict[str, Any], algorithm: str, train: Train, train_on_ranks: Train, adapters: dict[str, Any]
) -> None:
    values = {**adapters, "weight_quantize_algo": algorithm, "dora": True}
    alone = train(**values, **{name: value for name, value in layout.items() if "parallel" not in name})
    divided = train_on_ranks(**values, **layout)
    np.testing.assert_allclose(divided.losses, alone.losses, rtol=1e-4)
    assert all("quantisation: " in said for said in divided.said)


def test_slices_that_would_divide_a_group_are_refused(make_config: Train, adapters: dict[str, Any]) -> None:
    config = make_config(**adapters, weight_quantize_algo="nf4", **TENSOR)
    model = ModelConfig.from_folder(config.basic.model_name_or_path)
    with pytest.raises(ConfigurationError, match=r"o_proj \(32 inputs in groups of 32\), down_proj \(48"):
        plan_layout(config, model, 2)
    plan_layout(make_config(**adapters, weight_quantize_algo="weight_only_int8", **TENSOR), model, 2)


@pytest.mark.parametrize("layout", [TENSOR, STAGES], ids=["tensor", "pipeline"])
def test_fp8_trains_as_in_one_process(layout: dict[str, Any], train: Train, train_on_ranks: Train) -> None:
    alone = train(**FP8, **{name: value for name, value in layout.items() if "parallel" not in name})
    divided = train_on_ranks(**FP8, **layout)
    np.testing.assert_allclose(divided.losses, alone.losses, rtol=2e-3)
    stored, expected = (json.loads((run.output / AVERAGES_FILE).read_text()) for run in (divided, alone))
    assert stored.keys() == expected.keys() and len(stored) == 14
    assert {steps for _, steps in stored.values()} == {4}
    if layout is TENSOR:  # stages pad micro-batches to one length, and what they pad with counts
        for path, (average, _) in stored.items():
            assert average == pytest.approx(expected[path][0], rel=0.02), path


def test_averages_are_the_largest_of_ranks_that_read_other_rows(train: Train, train_on_ranks: Train) -> None:
    """One step: two ranks with a row each see what one process sees with two rows."""
    one_step = {**FP8, "max_steps": 1, "per_device_train_batch_size": 1}
    alone = train(**{**one_step, "gradient_accumulation_steps": 2})
    divided = train_on_ranks(**one_step, nproc=2)
    stored, expected = (json.loads((run.output / AVERAGES_FILE).read_text()) for run in (divided, alone))
    assert {path: value for path, (value, _) in stored.items()} == pytest.approx(
        {path: value for path, (value, _) in expected.items()}, rel=1e-5
    )
