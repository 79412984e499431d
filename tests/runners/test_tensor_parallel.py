"""`erniekit train` on ranks that divide every large matrix: as in one process, and resumable."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .test_sharding import tensors

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = {
    "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "weight_decay": 0.1,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "slices": {"sequence_parallel": False, "tensor_parallel_config": "enable_mp_skip_c_identity"},
    "and the sequence": {"tensor_parallel_config": "sync_param sync_grad sync_moment"},
    "whole logits, sums once a step": {"tensor_parallel_output": False, "use_sp_callback": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_two_slices_train_as_one_process_and_go_on_from_their_checkpoint(
    train: Callable[..., Any], train_on_ranks: Callable[..., SimpleNamespace], way: str
) -> None:
    alone = train(**STEPS)
    divided = train_on_ranks(**STEPS, **WAYS[way], tensor_parallel_degree=2)
    np.testing.assert_allclose(divided.losses, alone.losses, atol=1e-5)
    found = tensors(divided.output, "model*.safetensors")
    for name, values in tensors(alone.output, "model*.safetensors").items():
        np.testing.assert_allclose(found[name], values, atol=1e-4, err_msg=name)

    first = divided.output / "checkpoint-2"
    again = train_on_ranks(
        **STEPS, **WAYS[way], tensor_parallel_degree=2, resume_from_checkpoint=str(first), overwrite_output_dir=True
    )
    for name, values in tensors(again.output, "model*.safetensors").items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)


@pytest.mark.parametrize("cut", [True, False])
def test_the_loss_reads_slices_or_whole_logits_as_asked(make_config: Callable[..., Any], cut: bool) -> None:
    from erniekit.build.model import open_model

    config = make_config(tensor_parallel_degree=2, tensor_parallel_output=cut, continue_training=False)
    assert open_model(config, None).head.parallel_output == cut
