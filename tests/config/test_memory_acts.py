"""Proofs of section 1.5: what is kept in memory, computed again, fused or moved away. Losses stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from erniekit.build import checks
from erniekit.errors import ConfigurationError
from tests.config.observing import recorded

Train = Callable[..., Any]

# parameter -> a value; the call in which it arrives: function, its argument, and what the argument then is
ARRIVES: dict[str, tuple[Any, str, str, Any]] = {
    "use_fused_head_and_loss_fn": (True, "erniekit.training.objectives.objective.token_loss", "fused", True),
    "use_sparse_head_and_loss_fn": (True, "erniekit.training.objectives.objective.token_loss", "sparse", True),
    "use_flash_attention": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "use_sparse_flash_attn": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "use_attn_mask_startend_row_indices": (False, "erniekit.model.attention.AttentionPlan.build", "dense", True),
    "release_grads": (True, "paddle.optimizer.AdamW.clear_grad", "set_to_zero", False),
}


@pytest.mark.proves(*ARRIVES)
@pytest.mark.parametrize("name", ARRIVES)
def test_it_arrives_and_changes_no_loss(name: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    value, function, argument, expected = ARRIVES[name]
    seen = recorded(function, argument, monkeypatch)
    plain = train().losses
    assert seen and expected not in seen
    seen.clear()
    np.testing.assert_allclose(train(**{name: value}).losses, plain, rtol=1e-5)
    assert set(seen) == {expected}


@pytest.mark.proves("use_attn_mask_startend_row_indices")
def test_a_dense_mask_is_announced_with_its_size_and_must_fit(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = {"use_attn_mask_startend_row_indices": False}
    assert "dense mask of up to 0.1 MiB" in train(**dense).said  # 2 rows x 128 x 128 float32
    assert "dense mask" not in train().said
    monkeypatch.setattr(checks, "available_memory", lambda: 2 * 128 * 128 * 4 - 1)
    with pytest.raises(ConfigurationError, match=r"max_seq_len 128 takes 0\.00 GiB"):
        train(**dense)
    train()


@pytest.mark.proves("recompute", "recompute_granularity", "recompute_use_reentrant", "no_recompute_layers")
def test_recomputation_keeps_the_losses_to_the_bit(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    seen = recorded("erniekit.model.recompute.recompute", "kwargs", monkeypatch)
    plain = train(**values).losses
    assert not seen
    for reentrant in (False, True):
        run = train(**values, recompute=True, recompute_use_reentrant=reentrant, no_recompute_layers=1)
        assert run.losses == plain
        assert "recompute: 1 of 2 layers" in run.said
        assert len(seen) == len(plain)  # one layer of the two, one micro-batch a step
        assert {call["use_reentrant"] for call in seen} == {reentrant}
        seen.clear()
    calls = recorded("erniekit.model.recompute.recompute", "arguments", monkeypatch)  # of what records above
    for granularity, part in (("full", "layer"), ("full_attn", "_attention"), ("core_attn", "core")):
        run = train(**values, recompute=True, recompute_granularity=granularity)
        assert run.losses == plain
        assert {getattr(function, "__name__", "layer") for function, *_ in calls} == {part}
        calls.clear()


@pytest.mark.proves("offload_optim", "tensorwise_offload_optimizer")
def test_moments_are_kept_away_from_memory(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = recorded("erniekit.training.optim.offload._MappedStore.__init__", "release", monkeypatch)
    plain = train()
    assert not mapped and "in a mapped file in" not in plain.said
    for name, gives_pages_back in (("offload_optim", False), ("tensorwise_offload_optimizer", True)):
        run = train(**{name: True})
        assert set(mapped) == {gives_pages_back}
        assert f"AdamW: moments in float32, in a mapped file in {run.output}" in run.said
        assert ("each page of it in memory only while it is used" in run.said) == gives_pages_back
        assert run.losses == plain.losses
        mapped.clear()
