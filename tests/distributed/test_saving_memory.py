"""Saving streams: on every layout a rank needs less than one shard beside training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .cases import saving_memory
from .cases.saving_memory import LARGEST, MODEL
from .ranks import run_ranks

ROOT = Path(__file__).parents[2]
SHARDED = {"sharding_parallel_degree": 2, "gradient_accumulation_steps": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "one process, its part": (1, {"unified_checkpoint": False}),
    "one process, O1": (1, {"ckpt_quant_stage": "O1"}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "sharding1": (2, {**SHARDED, "sharding": "stage1"}),
    "sharding1, split": (2, {**SHARDED, "sharding": "stage1", "sharding_parallel_config": "split_param"}),
    "sharding2": (2, {**SHARDED, "sharding": "stage2"}),
    "sharding3": (2, {**SHARDED, "sharding": "stage3"}),
    "sharding3, parts": (2, {**SHARDED, "sharding": "stage3", "unified_checkpoint": False}),
    "tp2 x pp2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}
# Shards that hold so many of the largest tensors; three where nothing is said. The checkpoint has 43.
LARGER_SHARDS = {"tp2": 5, "tp2 x pp2": 10, "sharding2": 10}
IN_THE_PLAIN_RUN = ("sharding3",)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [each if each in IN_THE_PLAIN_RUN else pytest.param(each, marks=pytest.mark.exhaustive) for each in LAYOUTS],
)
def test_saving_takes_less_than_a_shard(layout: str, tmp_path: Path) -> None:
    ranks, parameters = LAYOUTS[layout]
    shard = LARGER_SHARDS.get(layout, 3) * LARGEST
    shipped = ROOT / "examples/models/tiny-ernie"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    values = {
        "model_name_or_path": str(tmp_path), "continue_training": False, "output_dir": str(tmp_path / "run"),
        "train_dataset_path": str(ROOT / "examples/data/sft-train.jsonl"), "max_seq_len": 64, "max_steps": 1,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "save_strategy": "steps",
        "report_to": "none", "max_shard_size": shard / 1e9, **parameters,
    }  # fmt: skip
    figures = run_ranks(saving_memory.train, ranks, timeout=240, parameters=values)
    assert 3 * sum(figure["tensors"] for figure in figures) > 4 * shard
    for rank, figure in enumerate(figures):
        assert figure["beside"] < shard, f"rank {rank}: {figure['beside'] / LARGEST:.2f} times the largest tensor"
