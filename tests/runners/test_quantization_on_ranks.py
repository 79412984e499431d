"""Weights in few bits and FP8 products on several ranks: as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import ConfigurationError
from erniekit.model.configuration import ModelConfig
from erniekit.model.quantization.fp8 import AVERAGES_FILE
from erniekit.runners.layout_plan import plan_layout

Train = Callable[..., Any]
TENSOR = {"tensor_parallel_degree": 2, "sequence_parallel": False}
STAGES = {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 8, "apply_online_actscale_step": 2}


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
