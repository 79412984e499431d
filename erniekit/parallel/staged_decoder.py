"""Answers of a decoder whose parts are the stages of a pipeline: one pass at a time goes through all of them."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from erniekit.model.configuration import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.tensor_slice import TensorSlice
from erniekit.parallel.mesh import Mesh


class StagedDecoder:
    """What `model.generation` asks of a decoder. All stages call it together, with the same tokens, each with a
    key-value cache of its own; all get the same logits, and so choose the same tokens."""

    def __init__(self, part: Decoder, mesh: Mesh) -> None:
        self._part, self._stage = part, mesh.place.pipeline
        self._group, self._stages = mesh.group("pipeline"), mesh.topology.pipeline
        self._runs = mesh.topology.pipeline * mesh.topology.virtual_pipeline
        self._dtype = next(iter(part.parameters())).dtype

    @property
    def config(self) -> ModelConfig:
        return self._part.config

    @property
    def tensor(self) -> TensorSlice:
        return self._part.tensor

    @property
    def activation_scales(self) -> Any:
        return self._part.activation_scales

    @property
    def training(self) -> bool:
        return self._part.training

    def train(self) -> None:
        self._part.train()

    def eval(self) -> None:
        self._part.eval()

    def __call__(self, input_ids_BS: Tensor, position_ids_BS: Tensor, plan: Any) -> Tensor:
        """Hidden states [B, S, H], on the last stage after the final norm; on others they only have their shape."""
        context = self._part.context(position_ids_BS, plan)
        shape = [*input_ids_BS.shape, self.config.hidden_size]
        hidden_BSH = self._part.embedding(input_ids_BS) if self._part.part.first else paddle.empty(shape, self._dtype)
        for run in range(self._runs):
            owner = run % self._stages
            if owner == self._stage:
                hidden_BSH = self._part.through_layers(hidden_BSH, context, run // self._stages)
            if run < self._runs - 1:
                hidden_BSH = self._shared(hidden_BSH, owner)
        return self._part.norm(hidden_BSH) if self._part.part.last else hidden_BSH

    def head(self, rows_TH: Tensor) -> Tensor:
        """Logits [T, V]."""
        empty = [rows_TH.shape[0], self.config.vocab_size]
        logits_TV = self._part.head(rows_TH) if self._part.part.last else paddle.empty(empty, self._dtype)
        return self._shared(logits_TV, self._stages - 1)

    def _shared(self, tensor: Tensor, owner: int) -> Tensor:
        """The owner's tensor, on every stage."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self._group.ranks[owner], group=self._group)
        return tensor
