"""The whole of a forward pass as a layer, which is what fleet's sharded wrappers call."""

from __future__ import annotations

from typing import Any

from paddle import nn

from erniekit.training.passes import LossFunction, MicroBatchLoss


class LossLayer(nn.Layer):
    """(loss, batch) -> the loss of the batch under the model."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, batch: Any) -> MicroBatchLoss:
        return loss(self.model, batch)
