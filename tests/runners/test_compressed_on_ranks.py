"""Moments in few bits on every layout: written by one, read by another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from erniekit.model.storage.safetensors import SafetensorsFile
from erniekit.training.checkpoint.quantized_state import decompressed
from erniekit.training.checkpoint.tensors import open_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SINGLE_PROCESS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "max_grad_norm": 0.5}
DATA_PARALLEL = {**SINGLE_PROCESS, "gradient_accumulation_steps": 1}
SHARDED = {**DATA_PARALLEL, "sharding_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {**SINGLE_PROCESS, "tensor_parallel_degree": 2, "sequence_parallel": True},
    "pipeline": {**SINGLE_PROCESS, "pipeline_parallel_degree": 2},
    "stage1": {**SHARDED, "sharding": "stage1"},
    "stage1 split": {**SHARDED, "sharding": "stage1", "sharding_parallel_config": "split_param"},
    "stage2": {**SHARDED, "sharding": "stage2"},
    "stage3": {**SHARDED, "sharding": "stage3"},
    "experts": {**DATA_PARALLEL, "moe_group": "data"},
}
SAVING = {"max_steps": 4, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 2}


def state(folder: Path) -> dict[str, np.ndarray]:
    """An optimizer's state as it is read back."""
    files = decompressed(open_tensors(folder, "optimizer"), folder)
    return {name: files.read(name) for name in files.names}


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], limit: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].shape == values.shape, name
        assert np.linalg.norm(found[name] - values) <= limit * np.linalg.norm(values), name


@pytest.mark.parametrize(
    "layout",
    [layout if layout == "tensor" else pytest.param(layout, marks=pytest.mark.exhaustive) for layout in LAYOUTS],
)
def test_written_by_ranks_and_read_by_one_process_and_back(
    train: Callable[..., Any],
    train_on_ranks: Callable[..., SimpleNamespace],
    moe_model: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    model = {"model_name_or_path": str(moe_model)} if layout == "experts" else {}
    nproc = 2 if layout == "experts" else None
    alone = train(**SINGLE_PROCESS, **SAVING, **model, output_dir=str(tmp_path / "exact"))
    divided = train_on_ranks(**LAYOUTS[layout], **SAVING, **model, ckpt_quant_stage="O1", nproc=nproc)
    assert divided.losses == pytest.approx(alone.losses, abs=1e-4)  # saving changes nothing
    assert any("checkpoints hold AdamW's moments in 8 bits (ckpt_quant_stage O1)" in said for said in divided.said)
    written = divided.output / "checkpoint-2"
    assert SafetensorsFile(written / "optimizer.safetensors").metadata["ckpt_quant_stage"] == "O1"
    assert_near(state(written), state(alone.output / "checkpoint-2"), 0.02)

    resumed = train(**SINGLE_PROCESS, **SAVING, **model, resume_from_checkpoint=str(written), ckpt_quant_stage="O2")
    assert "resuming is not bit-exact" in resumed.said and "8 bits" in resumed.said
    assert resumed.losses == pytest.approx(alone.losses[2:], abs=5e-3)

    back = train_on_ranks(
        **LAYOUTS[layout],
        **SAVING | {"max_steps": 6},
        **model,
        nproc=nproc,
        resume_from_checkpoint=str(resumed.output / "checkpoint-4"),
        overwrite_output_dir=True,
    )
    assert any("holds AdamW's moments in 4 bits (ckpt_quant_stage O2)" in said for said in back.said)
    whole = train(**SINGLE_PROCESS, **SAVING | {"max_steps": 6}, **model, output_dir=str(tmp_path / "longer"))
    assert back.losses[-2:] == pytest.approx(whole.losses[4:], rel=0.05)


@pytest.mark.parametrize(
    "layout",
    [layout if layout == "stage2" else pytest.param(layout, marks=pytest.mark.exhaustive) for layout in LAYOUTS][:-1],
)
def test_every_rank_writes_and_reads_its_own(
    train_on_ranks: Callable[..., SimpleNamespace], tmp_path: Path, layout: str
) -> None:
    common = {**LAYOUTS[layout], **SAVING, "unified_checkpoint_config": ["ignore_merge_optimizer"]}
    first = train_on_ranks(**common, ckpt_quant_stage="O1")
    files = sorted((first.output / "checkpoint-2").glob("rank-*/optimizer*.safetensors"))
    assert {path.parent.name for path in files} == {"rank-00000", "rank-00001"}
    assert {SafetensorsFile(path).metadata["ckpt_quant_stage"] for path in files} == {"O1"}
    resumed = train_on_ranks(
        **common, resume_from_checkpoint=str(first.output / "checkpoint-2"), overwrite_output_dir=True
    )
    assert any("8 bits (ckpt_quant_stage O1)" in said for said in resumed.said)
    assert resumed.losses[-2:] == pytest.approx(first.losses[2:], abs=5e-3)


def test_moments_in_bfloat16_come_together_from_ranks_as_they_are(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace]
) -> None:
    """Slices travel in bfloat16, files hold bfloat16, and one process goes on as the ranks would have done.

    Asking to synchronise such moments, which the configuration tells to have no effect, changes nothing.
    """
    common = {**SAVING, "use_lowprecision_moment": True}
    divided = train_on_ranks(**LAYOUTS["tensor"], **common, tensor_parallel_config="sync_param sync_grad sync_moment")
    written = divided.output / "checkpoint-2"
    file = SafetensorsFile(written / "optimizer.safetensors")
    kinds = {name.rpartition("/")[2]: file.stored(name).dtype for name in file.names()}
    assert kinds == {"moment1": "BF16", "moment2": "BF16", "beta1_pow_acc": "F32", "beta2_pow_acc": "F32"}
    resumed = train(**SINGLE_PROCESS, **common, resume_from_checkpoint=str(written))
    assert resumed.losses == pytest.approx(divided.losses[2:], abs=2e-4)
