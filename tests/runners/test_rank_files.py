"""Checkpoints of which every rank writes a part of its own: exact on their layout, refused elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from erniekit.config import Config
from erniekit.errors import CheckpointError, ModelFileError
from erniekit.export.trained_model import find_trained_model

ROOT = Path(__file__).parents[2]
Train = Callable[..., Any]
OnRanks = Callable[..., SimpleNamespace]
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "unified_checkpoint": False}
SHARDED = {"sharding_parallel_degree": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    "sharding 1": {**SHARDED, "sharding": "stage1"},
    "sharding 1, split": {**SHARDED, "sharding": "stage1", "sharding_parallel_config": "split_param"},
    "sharding 1, fused": {**SHARDED, "sharding": "stage1", "sharding_parallel_config": "enable_stage1_tensor_fusion"},
    "sharding 2": {**SHARDED, "sharding": "stage2"},
    "sharding 3": {**SHARDED, "sharding": "stage3"},
}


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}


def same(run: SimpleNamespace, other: dict[str, np.ndarray]) -> None:
    found = weights(run.output)
    assert found.keys() == other.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_one_process_goes_on_from_its_part_which_is_no_model(train: Train, tmp_path: Path) -> None:
    first = train(**SAVING)
    folder, expected = first.output / "checkpoint-2", weights(first.output)
    shutil.rmtree(first.output / "checkpoint-4")
    again = train(**SAVING, resume_from_checkpoint=True)
    assert again.losses == first.losses
    same(again, expected)

    def no_model() -> Any:
        return pytest.raises(
            ModelFileError, match=r"checkpoint-2 is a sharded checkpoint[^\0]*unified_checkpoint: true"
        )

    with no_model():
        find_trained_model(folder, Config.from_mapping({}, verb="export"))
    with no_model():
        train(init_from_checkpoint=str(folder), continue_training=True, output_dir=str(tmp_path / "other"))
    with no_model():
        train(model_name_or_path=str(folder), output_dir=str(tmp_path / "other"))
    (first.output / "config.json").unlink()
    shutil.rmtree(first.output / "checkpoint-4")
    with no_model():
        find_trained_model(first.output, Config.from_mapping({}, verb="export"))


def test_parts_become_a_whole_checkpoint_where_the_run_goes_on_so(train: Train, tmp_path: Path) -> None:
    first = train(**SAVING)
    shutil.rmtree(first.output / "checkpoint-4")
    again = train(**{**SAVING, "unified_checkpoint": True}, resume_from_checkpoint=True)
    assert again.losses == first.losses
    assert "unified_checkpoint false -> true" in again.said
    assert find_trained_model(again.output / "checkpoint-4", Config.from_mapping({}, verb="export")).folder


@pytest.mark.parametrize("kind", ["PiSSA", "FP8", "copy of the reference"])
def test_what_else_a_run_has_is_in_its_part(train: Train, tiny_base: Path, kind: str) -> None:
    lora = {"model_name_or_path": str(tiny_base), "continue_training": True, "lora": True, "lora_rank": 4}
    pairs = {"stage": "DPO", "train_dataset_path": str(ROOT / "examples/data/preference-train.jsonl")}
    parameters: dict[str, dict[str, Any]] = {
        "PiSSA": {**lora, "lora_init": "pissa"},
        "FP8": {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 8, "apply_online_actscale_step": 1},
        "copy of the reference": {**pairs, "reference_model": "copy", "ref_model_update_steps": 2},
    }
    first = train(**SAVING, **parameters[kind])
    expected = weights(first.output)
    shutil.rmtree(first.output / "checkpoint-4")
    again = train(**SAVING, **parameters[kind], resume_from_checkpoint=True)
    assert again.losses == first.losses
    same(again, expected)


def test_adapters_of_another_kind_are_refused(train: Train, tiny_base: Path) -> None:
    lora = {"model_name_or_path": str(tiny_base), "continue_training": True, "lora": True, "lora_rank": 4}
    first = train(**SAVING, **lora)
    shutil.rmtree(first.output / "checkpoint-4")
    with pytest.raises(CheckpointError, match=r"lora_alpha was -1\.0, is 3\.0"):
        train(**SAVING, **lora, lora_alpha=3.0, resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="lora was True, is False"):
        train(**SAVING, resume_from_checkpoint=True)


def test_the_best_model_is_put_together_from_its_part(train: Train, records: Path) -> None:
    measured = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 2, "load_best_model_at_end": True}
    measured |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first is the best
    first = train(**SAVING, **measured)
    assert "saved the model of step 2" in first.said
    whole = train(**{**SAVING, "unified_checkpoint": True}, **measured, output_dir=str(first.output) + "-whole")
    same(first, weights(whole.output))


def test_a_missing_or_damaged_part_is_named(train: Train) -> None:
    first = train(**SAVING)
    part = first.output / "checkpoint-4" / "rank-00000"
    file = part / "optimizer.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"rank-00000/optimizer.safetensors does not have the content"):
        train(**SAVING, resume_from_checkpoint=str(first.output / "checkpoint-4"))
    shutil.rmtree(part)
    with pytest.raises(CheckpointError, match=r"rank-00000/\S+ is missing"):
        train(**SAVING, resume_from_checkpoint=str(first.output / "checkpoint-4"))
    again = train(**SAVING, resume_from_checkpoint=True)
    assert "skipped" in again.said and "rank-00000" in again.said and again.losses == first.losses


@pytest.mark.distributed
@pytest.mark.slow
def test_optimizer_states_may_stay_with_their_ranks(train: Train, train_on_ranks: OnRanks) -> None:
    """Weights are whole, so that they are a model; moments are for the layout that wrote them."""
    saving = {**SAVING, "unified_checkpoint": True, "unified_checkpoint_config": "ignore_merge_optimizer"}
    layout = LAYOUTS["sharding 1"]
    first = train_on_ranks(**layout, **saving, optim_shard_num=3)
    folder, expected = first.output / "checkpoint-2", weights(first.output)
    names = [f"optimizer-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for rank in (0, 1):
        assert sorted(path.name for path in (folder / f"rank-0000{rank}").iterdir()) == ["manifest.json", *names]
    sizes = [(folder / "rank-00000" / name).stat().st_size for name in names]
    assert max(sizes) < 0.6 * sum(sizes)
    assert find_trained_model(folder, Config.from_mapping({}, verb="export")).folder == folder
    assert not list(folder.glob("optimizer*"))
    shutil.rmtree(first.output / "checkpoint-4")
    again = train_on_ranks(**layout, **saving, resume_from_checkpoint=True)
    assert again.losses == first.losses
    same(again, expected)

    shutil.rmtree(first.output / "checkpoint-4")
    alone = {**saving, "output_dir": str(first.output), "gradient_accumulation_steps": 4}
    alone |= {"per_device_train_batch_size": 1, "resume_from_checkpoint": True}
    with pytest.raises(CheckpointError) as refused:
        train(**alone)
    message = str(refused.value)
    assert "written on: 2 ranks: sharding_parallel_degree 2, sharding stage1" in message
    assert "this run:   1 rank\n" in message and "ignore_load_lr_and_optim: true" in message
    fresh = train(**alone, ignore_load_lr_and_optim=True)
    assert fresh.losses[:3] == first.losses[:3] and fresh.losses[3] == pytest.approx(first.losses[3], rel=0.2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        each
        if each in ("tensor", "sharding 1, split", "sharding 3")
        else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in LAYOUTS
    ],
)
def test_a_run_goes_on_exactly_from_what_its_ranks_have_written(train_on_ranks: OnRanks, layout: str) -> None:
    first = train_on_ranks(**LAYOUTS[layout], **SAVING)
    folder = first.output / "checkpoint-2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json", "rank-00000", "rank-00001", "ranks.json", "run_identity.json", "trainer_state.json",
        "training_config.yaml",
    ]  # fmt: skip
    expected = weights(first.output)
    shutil.rmtree(first.output / "checkpoint-4")
    again = train_on_ranks(**LAYOUTS[layout], **SAVING, resume_from_checkpoint=True)
    assert again.losses == first.losses
    same(again, expected)
