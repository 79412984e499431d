"""Runs with experts and multi-token prediction: every parameter acts, layouts agree, nothing is left out silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.errors import ConfigurationError
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.storage.safetensors import SafetensorsFile

Train = Callable[..., Any]
# Router losses are off: they are means over micro-batches of different size, so that layouts could not agree.
WITHOUT_LOSSES = {"moe_aux_loss_lambda": 0.0}


@pytest.mark.parametrize(
    ("values", "base"),
    [
        ({"moe_aux_loss_lambda": 1.0}, {}),
        ({"moe_z_loss_lambda": 1.0}, {}),
        ({"moe_orthogonal_loss_lambda": 1.0}, {}),
        ({"moe_router_bias_update_rate": 0.05}, {}),
        ({"num_nextn_predict_layers": 1}, {}),
        ({"multi_token_pred_lambda": 3.0}, {"num_nextn_predict_layers": 1}),
    ],
    ids=lambda values: next(iter(values), ""),
)
def test_each_parameter_of_experts_and_predictions_changes_the_losses(
    train: Train, moe_model: Path, values: dict[str, Any], base: dict[str, Any]
) -> None:
    plain = train(model_name_or_path=str(moe_model), **base)
    other = train(model_name_or_path=str(moe_model), **{**base, **values})
    assert other.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)  # the loss shown is that of the target tokens
    assert other.losses != plain.losses


def test_losses_of_routers_and_predictions_are_shown(train: Train, moe_model: Path) -> None:
    run = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=1, moe_z_loss_lambda=0.1)
    lines = [json.loads(line) for line in (run.output / "training_log.jsonl").read_text().splitlines()]
    shown = [line for line in lines if "router_aux_loss" in line]
    assert len(shown) == 4
    assert all(1.0 < line["router_aux_loss"] < 4.0 and line["router_z_loss"] > 0 for line in shown)
    assert all(0.5 * line["loss"] < line["mtp_loss"] < 2 * line["loss"] for line in shown[:1])


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_shape_does_not_change_the_losses(train: Train, moe_model: Path, recompute: bool) -> None:
    values = {"model_name_or_path": str(moe_model), "num_nextn_predict_layers": 1, "recompute": recompute}
    values |= WITHOUT_LOSSES
    four_rows = train(**values, per_device_train_batch_size=4)
    four_times = train(**values, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    np.testing.assert_allclose(four_times.losses, four_rows.losses, rtol=2e-5)


def test_predictions_that_a_run_leaves_out_are_told_and_not_saved(train: Train, moe_model: Path) -> None:
    run = train(model_name_or_path=str(moe_model))
    assert "1 of the model's multi-token prediction layers is left out" in run.said
    assert ModelConfig.from_folder(run.output).num_nextn_predict_layers == 0
    run = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=1)
    assert "left out" not in run.said
    assert ModelConfig.from_folder(run.output).num_nextn_predict_layers == 1
    assert any(".mtp_block.0." in name for name in SafetensorsFile(run.output / "model.safetensors").names())


def test_predictions_that_the_model_does_not_have_are_refused(train: Train, tiny_model: Path, moe_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="the model has 0 multi-token prediction layers"):
        train(model_name_or_path=str(tiny_model), num_nextn_predict_layers=1)
    trained = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=1).output
    saved = trained.rename(trained.with_name("saved"))
    with pytest.raises(ConfigurationError, match="the model has 1 multi-token"):
        train(model_name_or_path=str(saved), continue_training=True, num_nextn_predict_layers=2)


def test_a_model_without_experts_has_no_use_for_their_losses(train: Train) -> None:
    assert "`moe_z_loss_lambda: 0.1` has no effect: ernie4_5 has no experts" in train(moe_z_loss_lambda=0.1).said
    assert "moe_" not in train().said


def test_adapters_leave_routers_as_they_are(train: Train, moe_model: Path) -> None:
    """With adapters the bias update has nothing to update; the experts have adapters of their own."""
    base = train(model_name_or_path=str(moe_model)).output
    base = base.rename(base.with_name("base"))
    values = {"model_name_or_path": str(base), "continue_training": True, "lora": True, "lora_rank": 4}
    plain = train(**values)
    biased = train(**values, moe_router_bias_update_rate=0.05)
    assert biased.losses == plain.losses
    assert "`moe_router_bias_update_rate: 0.05` has no effect: adapters leave routers" in biased.said
    assert "has no effect: adapters" not in plain.said
    names = SafetensorsFile(plain.output / "adapter_model.safetensors").names()
    assert any(".mlp.experts.0.up_proj.lora_A" in name for name in names)
    assert not any(".mlp.gate." in name for name in names)


@pytest.mark.parametrize("trained", [0, 1])
def test_adapters_serve_whether_their_run_had_the_predictions_or_not(
    trained: int,
    train: Train,
    moe_model: Path,
    records: Path,
    make_config: Callable[..., Any],
    tmp_path: Path,
    logged: list[str],
) -> None:
    from erniekit.inference.engine import ChatModel
    from erniekit.model.lora.lora import named_adapters
    from erniekit.runners.evaluate import run_evaluation

    base = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=1, output_dir=str(tmp_path / "base"))
    values = {"model_name_or_path": str(base.output), "continue_training": True, "lora": True, "lora_dropout": 0.1}
    options = {**values, "num_nextn_predict_layers": trained, "save_strategy": "steps", "save_steps": 2}
    held_out = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 4, "max_evaluate_steps": -1}
    whole = train(**options, **held_out)
    names = SafetensorsFile(whole.output / "adapter_model.safetensors").names()
    assert any(".mtp_linear_proj.0.lora_A" in name for name in names) == bool(trained)
    resumed = train(
        **options, output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=str(whole.output / "checkpoint-2")
    )
    assert resumed.losses == whole.losses[2:]
    weights = "adapter_model.safetensors"
    assert (resumed.output / weights).read_bytes() == (whole.output / weights).read_bytes()
    assert ModelConfig.from_folder(base.output).num_nextn_predict_layers == 1
    assert len(named_adapters(ChatModel.load(whole.output).decoder)) * 2 == len(names)
    for depths in (0, 1):
        logged.clear()
        config = make_config(
            **values, **held_out, num_nextn_predict_layers=depths, do_train=False, lora_path=str(whole.output)
        )
        result = run_evaluation(config)
        assert result.loss == pytest.approx(whole.result.evaluation.loss, rel=1e-6)
        assert not any("other weights" in line for line in logged)


def test_evaluation_moves_no_bias_and_counts_in_no_loss(train: Train, moe_model: Path, records: Path) -> None:
    values = {"model_name_or_path": str(moe_model), "moe_router_bias_update_rate": 0.05, "num_nextn_predict_layers": 1}
    held_out = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 1, "max_evaluate_steps": 2}
    plain = train(**values)
    weights = (plain.output / "model.safetensors").read_bytes()
    evaluated = train(**values, **held_out)
    assert evaluated.result.evaluation is not None
    assert (evaluated.output / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("kind", [{}, {"dora": True, "lora_init": "pissa"}], ids=["LoRA", "PiSSA and DoRA"])
def test_recomputation_beside_experts_changes_no_bit_of_the_adapters(
    kind: dict[str, Any], train: Train, moe_model: Path, tmp_path: Path
) -> None:
    base = train(model_name_or_path=str(moe_model), num_nextn_predict_layers=1, output_dir=str(tmp_path / "base"))
    values = {"model_name_or_path": str(base.output), "continue_training": True, "num_nextn_predict_layers": 1}
    values |= {"lora": True, "lora_dropout": 0.2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    values |= {"moe_aux_loss_lambda": 0.1, "moe_z_loss_lambda": 0.1, "gradient_accumulation_steps": 2, **kind}
    plain = (train(**values).output / "adapter_model.safetensors").read_bytes()
    for reentrant in (False, True):
        again = train(**values, recompute=True, recompute_use_reentrant=reentrant)
        assert (again.output / "adapter_model.safetensors").read_bytes() == plain


def test_experts_that_no_rank_divides_are_told(train: Train, moe_model: Path) -> None:
    asked = {"moe_group": "data", "moe_multimodal_dispatch_use_allgather": "v2-allgather"}
    said = train(**asked).said
    assert "`moe_group: data` has no effect: ernie4_5 has no experts" in said
    assert "`moe_multimodal_dispatch_use_allgather: v2-allgather` has no effect: ernie4_5 has no experts" in said
    said = train(model_name_or_path=str(moe_model), **asked).said
    assert "`moe_group: data` has no effect: no two ranks train on different data" in said
    assert "`moe_multimodal_dispatch_use_allgather: v2-allgather` has no effect: every rank holds all experts" in said
    said = train(model_name_or_path=str(moe_model), moe_group="mp").said
    assert "`moe_group: mp` has no effect: tensor_parallel_degree is 1" in said
    assert "has no effect" not in train(model_name_or_path=str(moe_model), moe_group="dummy").said
