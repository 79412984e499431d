"""The memory of a training step that is not the first, as Paddle counts it; nothing else has raised the peak."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.base import core

from erniekit.model.attention import AttentionPlan
from erniekit.model.bf16 import weights_stay
from erniekit.model.builder import build_model
from erniekit.model.cpu_precision import CpuBFloat16
from erniekit.model.head import token_loss
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.model.recompute import Recompute
from erniekit.native import library
from tests.model.tiny import tiny_config


def peak_of_training(
    shape: dict[str, Any], batch: int, length: int, documents: int, fused: bool, dense: bool, lora: bool,
    dropout: float, again: str, kernels: str, rounded: bool,
) -> int:  # fmt: skip
    """Return the peak in bytes of all tensors."""
    library.use(kernels)
    settings = LoraSettings(rank=8, alpha=16.0, dropout=dropout) if lora else None
    recompute = Recompute(granularity=again) if again else None
    decoder = build_model(tiny_config(**shape), None, lora=settings, recompute=recompute)
    if rounded:
        CpuBFloat16().apply_to(decoder)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=list(named_trainable_parameters(decoder).values()))
    document = length // documents
    # The first step only leaves gradients and moments, if its tokens reach all experts.
    for rows, columns in ((1, min(length, 512)), (batch, length)):
        each = min(document, columns)
        ids = paddle.randint(0, shape["vocab_size"], [rows, columns])
        positions = paddle.arange(columns).expand([rows, columns])
        ends = np.repeat((np.arange(columns // each) + 1) * each, each)
        indices = np.broadcast_to(ends[None, None, :, None], (rows, 1, columns, 1)).astype(np.int32).copy()
        plan = AttentionPlan.build(indices, dense=dense)
        with weights_stay():
            token_loss(decoder, decoder(ids, positions, plan), ids, fused=fused).loss_sum.backward()
        optimizer.step()
        optimizer.clear_grad()
    return int(core.host_memory_stat_peak_value("Allocated", 0))
