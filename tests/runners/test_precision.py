"""What sections 1.7 and 1.8 become on a GPU, and that a CPU reports them and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest

from erniekit.build.precision import (
    apply_mixed_precision,
    choose_kernels,
    initial_loss_scale,
    mixed_precision,
    unknown_operators,
)
from erniekit.config import Config
from erniekit.errors import ConfigurationError
from erniekit.model.kernels import FusedKernels
from erniekit.model.mixed_precision import MixedPrecision

from ..model.tiny import tiny_model

ASKED: dict[str, Any] = {
    "fp16": True, "fp16_opt_level": "O2", "scale_loss": 4096, "amp_custom_white_list": "lookup_table matmul",
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
    assert initial_loss_scale(config) == 4096.0
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
    logged.clear()
    apply_mixed_precision(make_config(fuse_linear=True), tiny_model(**changes))
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


@pytest.mark.proves("bf16", *ASKED)
def test_a_cpu_reports_each_and_changes_no_loss(train: Callable[..., Any]) -> None:
    plain, asked, wide = train(), train(**ASKED, device="cpu"), train(bf16=True, device="cpu")
    assert asked.losses == plain.losses == wide.losses
    assert "`bf16: true` (config.yaml:1) has no effect on a CPU: fp32 runs" in wide.said
    for name in ASKED:
        assert (f"`{name}: " in asked.said) is (name != "fuse_swiglu"), name  # a CPU has this kernel
    assert "mixed precision:" not in asked.said and "fused kernels: swiglu\n" in asked.said
