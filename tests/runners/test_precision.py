"""What sections 1.7 and 1.8 become on a GPU, and on a CPU: fp16 is told there, and bfloat16 computes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from erniekit.build.precision import (
    apply_mixed_precision,
    choose_kernels,
    initial_loss_scale,
    loss_scale_bounds,
    mixed_precision,
    unknown_operators,
)
from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.model import bf16
from erniekit.model.kernels import FusedKernels
from erniekit.model.mixed_precision import MixedPrecision
from erniekit.native import onednn

from ..model.tiny import tiny_model

ASKED: dict[str, Any] = {
    "fp16": True, "fp16_opt_level": "O2", "scale_loss": 4096, "min_loss_scale": 16, "max_loss_scale": 8192,
    "amp_custom_white_list": "lookup_table matmul",
    "amp_custom_black_list": "reduce_sum", "amp_master_grad": True,
    "fuse_rope": True, "fuse_linear": True, "fuse_rms_norm": True, "fuse_swiglu": True,
}  # fmt: skip


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")


@pytest.mark.proves("bf16", *ASKED)
def test_every_parameter_arrives_on_a_gpu(
    make_config: Callable[..., Config], on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    config = make_config(**ASKED)
    assert mixed_precision(config) == MixedPrecision("float16", "O2", ("lookup_table", "matmul"), ("reduce_sum",), True)
    assert initial_loss_scale(config) == 4096.0 and loss_scale_bounds(config) == (16.0, 8192.0)
    wide = make_config(bf16=True, scale_loss=4096)
    assert mixed_precision(wide) == MixedPrecision("bfloat16") and initial_loss_scale(wide) is None
    assert mixed_precision(make_config()) is None
    monkeypatch.setattr("erniekit.model.kernels._chosen", FusedKernels())
    logged.clear()
    choose_kernels(config)
    assert logged == ["fused kernels: rope, linear, rms_norm, swiglu"]


@pytest.mark.parametrize(("changes", "said"), [({}, 1), ({"use_bias": True}, 0)])
def test_fusing_biases_that_a_model_lacks_is_told(
    make_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    said: int,
    logged: list[str],
) -> None:
    monkeypatch.setattr("erniekit.model.kernels._chosen", FusedKernels(linear=True))
    model = tiny_model(**changes)
    logged.clear()
    apply_mixed_precision(make_config(fuse_linear=True), model)
    assert logged == ["`fuse_linear` has no effect: no linear layer of this model has a bias"] * said


def test_an_operator_that_paddle_lacks_is_told(make_config: Callable[..., Config]) -> None:
    assert unknown_operators(make_config(**ASKED)) == []
    (line,) = unknown_operators(make_config(bf16=True, amp_custom_white_list="matmul reduce_sumn"))
    assert "reduce_sumn has no effect: this Paddle has no operator of that name; did you mean `reduce_sum`" in line


@pytest.mark.parametrize(
    ("sharding", "words"),
    [("stage2", []), ("stage3", []), ("stage1", ["split_param"]), ("stage1", ["enable_stage1_tensor_fusion"])],
)
def test_float32_gradients_do_not_go_with_those_that_fleet_adds_up(
    make_config: Callable[..., Config], sharding: str, words: list[str]
) -> None:
    sixteen = {"bf16": True, "fp16_opt_level": "O2", "sharding_parallel_degree": 2}
    divided = {"sharding": sharding, "sharding_parallel_config": words}
    with pytest.raises(
        ConfigurationError, match=r"`amp_master_grad`: float32 gradients are not possible with `sharding: stage"
    ):
        make_config(**sixteen, **divided, amp_master_grad=True)
    make_config(**sixteen, **divided)
    make_config(**sixteen, sharding="stage1", amp_master_grad=True)


@pytest.mark.proves(*ASKED)
def test_a_cpu_reports_each_and_changes_no_loss(train: Callable[..., Any]) -> None:
    plain, asked = train(fuse_swiglu=True), train(**ASKED, device="cpu")
    assert asked.losses == plain.losses
    for name in ASKED:
        assert (f"`{name}: " in asked.said) is (name != "fuse_swiglu"), name  # a CPU has this kernel
    assert "mixed precision:" not in asked.said and "fused kernels: swiglu\n" in asked.said


# bfloat16 on a CPU. `always`, because `auto` asks the processor.

ALWAYS = {"bf16": True, "cpu_bf16": "always", "device": "cpu"}
LOSS = "softmax_with_cross_entropy"
FUSED = {"use_fused_head_and_loss_fn": True}


def differs_slightly(one: Any, other: Any) -> bool:
    """Whether two runs have other losses, by less than bfloat16's rounding makes of a few steps."""
    np.testing.assert_allclose(one.losses, other.losses, rtol=5e-3)
    return one.losses != other.losses


@pytest.mark.proves("bf16", "cpu_bf16")
def test_a_cpu_computes_in_bfloat16_where_that_is_faster_or_asked_for(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, always = train(), train(**ALWAYS)
    assert differs_slightly(plain, always)
    assert "mixed precision: bfloat16 products of linear layers and head; float32 weights" in always.said
    for is_faster, expected in ((True, always), (False, plain)):
        monkeypatch.setattr(bf16, "is_faster", lambda is_faster=is_faster: (is_faster, "this processor says so"))
        auto = train(bf16=True, device="cpu")
        assert auto.losses == expected.losses
        told = "`bf16: true` (config.yaml:1) has no effect here: fp32 runs (this processor says so; `cpu_bf16: always`"
        assert (told in auto.said) is not is_faster


def test_a_processor_without_bfloat16_rounds_as_well(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    always = train(**FUSED, **ALWAYS)
    monkeypatch.setattr(onednn, "problem", lambda: "this processor has none")
    emulated = train(**FUSED, **ALWAYS)
    np.testing.assert_allclose(emulated.losses, always.losses, rtol=2e-4)
    assert "`cpu_bf16: always` (config.yaml:3) is slow here: this processor has none" in emulated.said


@pytest.mark.proves("amp_custom_black_list")
def test_operators_of_the_black_list_compute_in_float32(train: Callable[..., Any]) -> None:
    plain, always = train(), train(**ALWAYS)
    layers = train(**ALWAYS, amp_custom_black_list=LOSS)
    none = train(**ALWAYS, amp_custom_black_list="matmul exp")
    assert none.losses == plain.losses and none.losses != layers.losses != always.losses
    assert "bfloat16 products of linear layers; float32 weights" in layers.said
    assert "`amp_custom_black_list` (config.yaml:1): exp has no effect on a CPU" in none.said
    assert "`amp_custom_black_list` (config.yaml:1): fp32 runs: no product is left" in none.said


@pytest.mark.proves("amp_custom_white_list")
def test_the_white_list_adds_nothing_to_all_products(prefer: Callable[..., Any]) -> None:
    plain, wide = prefer(**FUSED), prefer(**FUSED, **ALWAYS)
    listed = prefer(**FUSED, **ALWAYS, amp_custom_white_list="matmul flash_attn")
    assert differs_slightly(plain, wide) and listed.losses == wide.losses
    assert "`amp_custom_white_list` (config.yaml:1) has no effect on a CPU: all that can" in listed.said
    assert "amp_custom_white_list" not in wide.said
    # the reference computes as the model does, though float32's is in the cache
    assert "nothing to compute" not in wide.said and wide.log[0]["kl_to_reference"] == 0.0


@pytest.mark.proves("fp16_opt_level", "amp_master_grad")
def test_level_o2_rounds_gradients_unless_they_stay_in_float32(train: Callable[..., Any]) -> None:
    first = train(**ALWAYS)
    rounded = train(
        **ALWAYS, fp16_opt_level="O2", unified_checkpoint_config="remove_master_weight", save_strategy="steps"
    )
    kept = train(**ALWAYS, fp16_opt_level="O2", amp_master_grad=True)
    assert kept.losses == first.losses and differs_slightly(first, rounded)
    assert rounded.losses[0] == first.losses[0]
    assert "remove_master_weight has no effect: weights are float32 on a CPU" in rounded.said


def test_recomputation_and_evaluation_give_the_same_bits(train: Callable[..., Any], records: Path) -> None:
    evaluated = {"do_eval": True, "eval_dataset_path": str(records), "eval_steps": 2, "evaluation_strategy": "steps"}
    plain, stored = train(**evaluated), train(**ALWAYS, **evaluated)
    again = train(**ALWAYS, **evaluated, recompute=True, recompute_granularity="full_attn")
    assert again.losses == stored.losses
    ours, theirs, recomputed = (
        [line["eval_loss"] for line in run.log if "eval_loss" in line] for run in (stored, plain, again)
    )
    assert ours == recomputed != theirs and ours
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)


def test_experts_and_adapters_compute_in_bfloat16(
    train: Callable[..., Any], train_adapters: Callable[..., Any], moe_model: Path
) -> None:
    experts = {"model_name_or_path": str(moe_model), "max_steps": 2}
    assert differs_slightly(train(**experts), train(**experts, **ALWAYS))
    assert differs_slightly(train_adapters(max_steps=2), train_adapters(max_steps=2, **ALWAYS))


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_round_as_one_process_does(train: Callable[..., Any], train_on_ranks: Callable[..., Any]) -> None:
    level = {**ALWAYS, "fp16_opt_level": "O2", "per_device_train_batch_size": 1}
    alone = train(**level, gradient_accumulation_steps=2)
    shards = train_on_ranks(**level, sharding="stage3", sharding_parallel_degree=2)
    halves = train_on_ranks(**level, gradient_accumulation_steps=2, tensor_parallel_degree=2)
    for ranks in (shards, halves):
        np.testing.assert_allclose(ranks.losses, alone.losses, rtol=1e-4)


def test_a_run_resumes_to_the_same_bits_and_is_told_of_another_precision(train: Callable[..., Any]) -> None:
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(**saving, **ALWAYS)
    shutil.rmtree(whole.output / "checkpoint-4")
    again = train(**saving, **ALWAYS, resume_from_checkpoint=True)
    assert again.losses == whole.losses and "not bit-exact" not in again.said
    shutil.rmtree(whole.output / "checkpoint-4")
    other = train(**saving, resume_from_checkpoint=True)
    assert "resuming is not bit-exact: precision was bfloat16 products: head, linear, is float32" in other.said
