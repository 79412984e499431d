"""Proofs of section 2.4: products through 8-bit floats, and AdamW's moments in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.config.observing import recorded, tensors
from tests.config.samples import load, problems

Train = Callable[..., Any]
IN_FP8 = {"weight_quantize_algo": "fp8_linear", "hadamard_block_size": 16}
STILL = {**IN_FP8, "learning_rate": 0.0}  # the same weights in every step


@pytest.mark.proves("apply_hadamard", "hadamard_block_size")
def test_activations_and_weights_are_rotated_in_blocks(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = recorded("erniekit.model.quantization.fp8.hadamard_rotate", "block", monkeypatch)
    losses = {}
    for block in (16, 8):
        losses[block] = train(**{**IN_FP8, "hadamard_block_size": block}, max_steps=1).losses[0]
        assert set(blocks) == {block}
        blocks.clear()
    losses[0] = train(**IN_FP8, apply_hadamard=False, max_steps=1).losses[0]
    assert not any(blocks) and len(set(losses.values())) == 3
    assert "not a power of two" in problems(**{**IN_FP8, "hadamard_block_size": 24})


@pytest.mark.proves("apply_online_actscale_step", "actscale_moving_rate")
def test_scales_follow_each_batch_first_and_an_average_later(train: Train) -> None:
    """The first step has no average; then the largest value of each batch, or the average of those before it."""
    batches = train(**STILL).losses
    later = train(**STILL, apply_online_actscale_step=2).losses
    assert later[:2] == batches[:2] and later[2:] != batches[2:]
    immediate = train(**STILL, apply_online_actscale_step=0).losses
    assert immediate[0] == batches[0] and immediate[1] != batches[1]
    newest = train(**STILL, apply_online_actscale_step=0, actscale_moving_rate=1.0).losses
    assert newest[:2] == immediate[:2] and newest[2:] != immediate[2:]  # the last step instead of the mean of both
    assert "it counts steps" in problems(**IN_FP8, apply_online_actscale_step=True)


@pytest.mark.proves("quant_input_grad", "quant_weight_grad", "fp8_format_type")
def test_gradients_are_rounded_where_asked(train: Train) -> None:
    """They change no loss, and the gradient that follows from it: the norm that is logged."""

    def figures(**values: Any) -> tuple[float, float]:
        entry = train(**IN_FP8, **values, max_steps=1).log[0]
        return entry["loss"], entry["grad_norm"]

    plain = figures()
    rounded = [
        figures(**{name: True}, fp8_format_type=form)
        for name in ("quant_input_grad", "quant_weight_grad")
        for form in ("hybrid", "e4m3")
    ]
    assert {loss for loss, _ in rounded} == {plain[0]}
    assert len({norm for _, norm in (plain, *rounded)}) == 5
    assert "fp8_format_type" in "".join(load(**IN_FP8, fp8_format_type="e4m3").messages)


@pytest.mark.proves("use_lowprecision_moment")
def test_moments_are_rounded_to_sixteen_bits_after_each_step(train: Train) -> None:
    moments, losses = {}, {}
    for narrow in (False, True):
        run = train(use_lowprecision_moment=narrow, save_strategy="steps", save_steps=1)
        assert ("AdamW: moments in bfloat16" in run.said) == narrow
        moments[narrow] = tensors(run.output / "checkpoint-1", "optimizer.safetensors")
        losses[narrow] = run.losses
    for name, exact in moments[False].items():
        if "moment" in name:
            rounded = np.ascontiguousarray(moments[True][name], np.float32)
            assert not (rounded.view(np.uint32) & 0xFFFF).any(), name
            np.testing.assert_allclose(rounded, exact, rtol=2**-8, atol=1e-12)
    assert losses[True][:2] == losses[False][:2] and losses[True][2:] != losses[False][2:]
