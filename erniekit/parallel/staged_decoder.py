"""Answers of a decoder whose parts are the stages of a pipeline: one pass at a time goes through all of them."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor

from erniekit.model.configuration import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.tensor_slice import TensorParallel
from erniekit.parallel.mesh import Mesh


class PipelineParallelDecoder:
    """What `model.generation` asks of a decoder. All stages call it together, with the same tokens, each with a
    key-value cache of its own; all get the same logits, and so choose the same tokens."""

    def __init__(self, local_decoder: Decoder, mesh: Mesh) -> None:
        self._local_decoder, self._pp_stage = local_decoder, mesh.coords.pipeline
        self._group, self._num_stages = mesh.group("pipeline"), mesh.topology.pipeline
        self._num_chunks = mesh.topology.pipeline * mesh.topology.virtual_pipeline
        self._dtype = next(iter(local_decoder.parameters())).dtype

    @property
    def config(self) -> ModelConfig:
        return self._local_decoder.config

    @property
    def tp(self) -> TensorParallel:
        return self._local_decoder.tp

    @property
    def activation_scales(self) -> Any:
        return self._local_decoder.activation_scales

    @property
    def training(self) -> bool:
        return self._local_decoder.training

    def train(self) -> None:
        self._local_decoder.train()

    def eval(self) -> None:
        self._local_decoder.eval()

    def __call__(self, input_ids_BS: Tensor, position_ids_BS: Tensor, plan: Any) -> Tensor:
        """Hidden states [B, S, H], on the last stage after the final norm; on others they only have their shape."""
        context = self._local_decoder.context(position_ids_BS, plan)
        shape = [*input_ids_BS.shape, self.config.hidden_size]
        hidden_BSH = (
            self._local_decoder.embedding(input_ids_BS)
            if self._local_decoder.pipeline_stage.first
            else paddle.empty(shape, self._dtype)
        )
        for chunk in range(self._num_chunks):
            owner = chunk % self._num_stages
            if owner == self._pp_stage:
                hidden_BSH = self._local_decoder.forward_layers(hidden_BSH, context, chunk // self._num_stages)
            if chunk < self._num_chunks - 1:
                hidden_BSH = self._broadcast(hidden_BSH, owner)
        return self._local_decoder.norm(hidden_BSH) if self._local_decoder.pipeline_stage.last else hidden_BSH

    def head(self, rows_TH: Tensor) -> Tensor:
        """Logits [T, V]."""
        empty = [rows_TH.shape[0], self.config.vocab_size]
        logits_TV = (
            self._local_decoder.head(rows_TH)
            if self._local_decoder.pipeline_stage.last
            else paddle.empty(empty, self._dtype)
        )
        return self._broadcast(logits_TV, self._num_stages - 1)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """The owner's tensor, on every stage."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self._group.ranks[owner], group=self._group)
        return tensor
