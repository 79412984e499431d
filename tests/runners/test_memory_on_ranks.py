"""What trades time for memory changes no loss on ranks that divide a model, either."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    "tensor": {"tensor_parallel_degree": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("granularity", "reentrant"), [("full_attn", False), ("core_attn", True)])
def test_parts_computed_again_and_moments_in_files(
    train_on_ranks: Callable[..., SimpleNamespace], layout: str, granularity: str, reentrant: bool
) -> None:
    common = {**LAYOUTS[layout], "max_steps": 3, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    plain = train_on_ranks(**common)
    run = train_on_ranks(
        **common,
        recompute=True,
        recompute_granularity=granularity,
        recompute_use_reentrant=reentrant,
        offload_optim=True,
    )
    assert run.losses == plain.losses
    assert all("AdamW: moments in float32, in a mapped file" in said for said in run.said)
    part = {"full_attn": "the attention block", "core_attn": "the attention product"}[granularity]
    assert all(f"recompute: 2 of 2 layers, {part} of each" in said for said in run.said)


def test_ranks_that_divide_an_optimizer_keep_their_parts_in_files(
    train_on_ranks: Callable[..., SimpleNamespace],
) -> None:
    common = {"sharding": "stage3", "sharding_parallel_degree": 2, "max_steps": 3, "hidden_dropout_prob": 0.1}
    plain = train_on_ranks(**common)
    run = train_on_ranks(**common, recompute=True, recompute_granularity="full_attn", offload_optim=True)
    assert run.losses == plain.losses
    assert all("AdamW: moments in float32, in a mapped file" in said for said in run.said)
