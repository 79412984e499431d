"""Proofs of section 1.6: what is saved, when and how, and where a run starts again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import UserError
from tests.config.observing import recorded, tensors

Train = Callable[..., Any]


def checkpoints(run: Any) -> list[str]:
    return sorted(path.name for path in run.output.glob("checkpoint-*"))


@pytest.mark.proves("save_strategy", "save_steps", "save_total_limit")
def test_checkpoints_are_written_when_asked_and_so_many_kept(train: Train) -> None:
    assert checkpoints(train()) == []
    assert checkpoints(train(save_strategy="steps", save_steps=2)) == ["checkpoint-2", "checkpoint-4"]
    assert checkpoints(train(save_strategy="steps", save_steps=3)) == ["checkpoint-3", "checkpoint-4"]
    epochs = {"save_strategy": "epoch", "max_steps": None, "num_train_epochs": 2}
    assert checkpoints(train(**epochs)) == ["checkpoint-16", "checkpoint-8"]
    kept = train(save_strategy="steps", save_steps=1, save_total_limit=2)
    assert checkpoints(kept) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.proves("resume_from_checkpoint")
def test_a_resumed_run_goes_on_where_the_checkpoint_was_written(train: Train, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = train(**saving, output_dir=str(tmp_path / "whole"))
    named = train(**saving, resume_from_checkpoint=str(whole.output / "checkpoint-2"))
    assert named.losses == whole.losses[2:]
    np.testing.assert_equal(tensors(named.output), tensors(whole.output))
    newest = train(**saving, max_steps=6, output_dir=str(tmp_path / "whole"), resume_from_checkpoint=True)
    assert f"resuming from {whole.output / 'checkpoint-4'}" in newest.said and newest.result.step == 6


@pytest.mark.proves("init_from_checkpoint")
def test_a_new_run_starts_from_the_weights_of_a_checkpoint(train: Train, tmp_path: Path) -> None:
    first = train(output_dir=str(tmp_path / "first"), save_strategy="steps", save_steps=2)
    starts = {
        step: train(init_from_checkpoint=str(first.output / f"checkpoint-{step}"), continue_training=True)
        for step in (2, 4)
    }
    for run in starts.values():
        assert run.log[0]["step"] == 1 and run.log[0]["learning_rate"] == pytest.approx(1e-2)
    assert starts[4].losses[0] < starts[2].losses[0] < first.losses[0]


@pytest.mark.proves("ignore_save_lr_and_optim", "ignore_load_lr_and_optim")
def test_moments_are_left_out_of_checkpoints_or_left_behind(train: Train, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = train(**saving, output_dir=str(tmp_path / "whole"))
    assert (whole.output / "checkpoint-2" / "optimizer.safetensors").is_file()
    anew = train(**saving, resume_from_checkpoint=str(whole.output / "checkpoint-2"), ignore_load_lr_and_optim=True)
    assert anew.losses[0] == whole.losses[2] and anew.losses[1] != whole.losses[3]  # other moments, the same place
    rates = [[entry["learning_rate"] for entry in run.log] for run in (anew, whole)]
    assert rates[0] == rates[1][2:]
    without = train(**saving, ignore_save_lr_and_optim=True)
    assert not list(without.output.glob("checkpoint-*/optimizer*"))
    checkpoint = str(without.output / "checkpoint-2")
    with pytest.raises(UserError, match="ignore_load_lr_and_optim"):
        train(resume_from_checkpoint=checkpoint, overwrite_output_dir=True)


@pytest.mark.proves("ckpt_quant_stage", "disable_ckpt_quant")
def test_moments_are_compressed_as_asked(train: Train) -> None:
    sizes, losses = {}, {}
    for stage in ("O0", "O1", "O2"):
        run = train(save_strategy="steps", save_steps=2, ckpt_quant_stage=stage)
        sizes[stage] = (run.output / "checkpoint-2/optimizer.safetensors").stat().st_size
        assert ("resuming from them is not bit-exact" in run.said) == (stage != "O0")
        resumed = train(  # needs no parameter, and goes on with another stage
            resume_from_checkpoint=str(run.output / "checkpoint-2"),
            overwrite_output_dir=True,
            save_strategy="steps",
            ckpt_quant_stage="O2",
            disable_ckpt_quant=True,
        )
        said = f"holds AdamW's moments in {8 if stage == 'O1' else 4} bits (ckpt_quant_stage {stage})"
        assert (said in resumed.said) == (stage != "O0")
        assert (resumed.output / "checkpoint-4/optimizer.safetensors").stat().st_size == sizes["O0"]
        losses[stage] = resumed.result.loss
    assert sizes["O2"] < sizes["O1"] < 0.4 * sizes["O0"]
    assert losses["O1"] != losses["O0"] and losses["O2"] != losses["O0"]
    assert abs(losses["O1"] - losses["O0"]) < abs(losses["O2"] - losses["O0"]) < 0.1 * losses["O0"]


@pytest.mark.proves("unified_checkpoint")
def test_a_checkpoint_is_a_model_or_the_parts_of_its_ranks(train: Train) -> None:
    for unified in (True, False):
        run = train(unified_checkpoint=unified, save_strategy="steps", save_steps=2)
        folder = run.output / "checkpoint-2"
        assert (folder / "model.safetensors").is_file() == unified == (not (folder / "rank-00000").is_dir())
        assert (run.output / "model.safetensors").is_file()  # the final model is whole in any case


@pytest.mark.proves("unified_checkpoint_config", "optim_shard_num")
def test_optimizer_states_may_stay_with_their_ranks(train: Train) -> None:
    for count in (1, 3):
        run = train(
            unified_checkpoint_config="ignore_merge_optimizer", optim_shard_num=count,
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
        folder = run.output / "checkpoint-2"
        assert (folder / "model.safetensors").is_file() and not list(folder.glob("optimizer*"))
        assert len(list((folder / "rank-00000").glob("optimizer*.safetensors"))) == count


@pytest.mark.proves("unified_checkpoint_config")
def test_training_goes_on_while_another_process_writes(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checkpoints, bit for bit, written aside."""
    started = recorded("erniekit.training.checkpoint.async_save.AsyncSaver._start", "target", monkeypatch)
    saving = {"save_strategy": "steps", "save_steps": 2}
    synchronous = tensors(train(**saving).output / "checkpoint-2", "optimizer.safetensors")
    assert not started
    asynchronous = train(**saving, unified_checkpoint_config="async_save")
    assert [target.name for target in started] == ["checkpoint-2", "checkpoint-4"] == checkpoints(asynchronous)
    np.testing.assert_equal(tensors(asynchronous.output / "checkpoint-2", "optimizer.safetensors"), synchronous)


@pytest.mark.proves("max_shard_size")
def test_no_file_of_weights_is_larger_than_asked(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = recorded("erniekit.build.checkpoint.save_model_folder", "max_shard_bytes", monkeypatch)
    (whole,) = train().output.glob("model*.safetensors")
    assert whole.stat().st_size > 120_000
    shards = list(train(max_shard_size=7e-5).output.glob("model-*.safetensors"))
    assert len(shards) == 2 and all(shard.stat().st_size < 72_000 for shard in shards)
    assert set(limits) == {5_000_000_000, 70_000}  # a GB has 10^9 bytes
