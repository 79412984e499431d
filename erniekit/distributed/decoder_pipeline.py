"""Train, evaluate and generate with a decoder that is cut into the stages of a pipeline.

`DecoderPipeline` has the pipeline's `Ranks.forward_backward` and `Ranks.forward_only`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from erniekit.data.batch import Batch
from erniekit.distributed.mesh import Mesh
from erniekit.distributed.pipeline import Pipeline, PipelineOptions
from erniekit.distributed.stages import layer_chunks
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder import Decoder, PipelineStage
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.training.objectives.forward import (
    Forward,
    HeadResult,
    Loss,
    MicroBatchLoss,
    add_router_metrics,
    batch_context,
    embedding_inputs,
)

BATCHES_PER_STAGE = 4  # in forward_only; stages then wait for less than a fifth of the time


def build_pipeline_stage(layers: int, mesh: Mesh, method: str | tuple[int, ...], tail: int = 0) -> PipelineStage | None:
    """Return this rank's stage of a stack of so many decoder layers (see `layer_chunks`); None without a pipeline."""
    if mesh.topology.pipeline == 1:
        return None
    num_stages, pp_stage = mesh.topology.pipeline, mesh.coords.pipeline
    chunks = layer_chunks(layers, mesh.topology, method=method, tail=tail)
    return PipelineStage(tuple(chunks[pp_stage::num_stages]), first=pp_stage == 0, last=pp_stage == num_stages - 1)


class DecoderPipeline:
    """This rank's stage of a pipeline; it serves every decoder that is cut in the same way, also a reference model.

    Attributes:
        embedding_group: the first and the last stage, which both have the embedding; None where only the first has it.
        num_forward_batches: how many batches `forward_only` should get at a time.

    Args:
        tied_embeddings: whether the last stage has a copy of the embedding.
    """

    def __init__(self, mesh: Mesh, options: PipelineOptions | None = None, *, tied_embeddings: bool = False) -> None:
        options = options or PipelineOptions()
        if mesh.topology.sequence_parallel:  # then ranks of a tensor-parallel group have different tensors
            options = replace(options, partial=False)
        self._mesh, self._options = mesh, options
        self.embedding_group = _first_last_stage_group(mesh) if tied_embeddings else None
        self._pipeline = Pipeline(mesh.topology.virtual_pipeline, self._options)
        self.num_forward_batches = BATCHES_PER_STAGE * mesh.topology.pipeline

    def forward_backward(
        self,
        model: Decoder,
        loss: Loss,
        batches: Sequence[Batch],
        begin_micro_batch: Callable[[int], None],
        units: float,
    ) -> list[MicroBatchLoss]:
        """See `Ranks.forward_backward`."""
        results: list[Mapping[str, Tensor]] = [{}] * len(batches)

        def on_result(number: int, result: MicroBatchLoss) -> Tensor:
            if number >= len(batches):
                return result.loss_sum * 0.0
            results[number] = {name: value.detach() for name, value in result.named_tensors().items()}
            return result.loss_sum / units

        def begin_padded_micro_batch(number: int) -> None:
            begin_micro_batch(number if number < len(batches) else 0)
            if number >= len(batches):
                model.balance.loss_weight = 0.0

        forward_step = self._forward_step(model, loss, batches, begin_padded_micro_batch, on_result)
        self._pipeline.train(forward_step, forward_step.count, forward_step.shape)
        reported = [model.balance.reported(number) for number in range(len(batches))]
        local = {
            "results": _on_host(results),
            "totals": _on_host([{name: total for name, (total, _) in of.items()} for of in reported]),
            "counts": [{name: count for name, (_, count) in of.items()} for of in reported],
        }
        of_stages = self._mesh.all_gather_object(local, "pipeline")
        losses = []
        for number, metrics in enumerate(of_stages[-1]["results"]):
            sums = {name: paddle.to_tensor(value, dtype="float64") for name, value in metrics.items()}
            routers = [(of_stage["totals"][number], of_stage["counts"][number]) for of_stage in of_stages]
            result = MicroBatchLoss(sums.pop("loss_sum"), sums)
            losses.append(add_router_metrics(result, _sum_router_metrics(routers), loss.units(batches[number])))
        return losses

    def forward_only(
        self, model: Decoder, forward: Forward[HeadResult], batches: Sequence[Batch]
    ) -> list[Mapping[str, np.ndarray]]:
        """See `Ranks.forward_only`."""
        results: list[Any] = [None] * len(batches)

        def on_result(number: int, result: HeadResult) -> Tensor:
            if number < len(batches):
                arrays = {name: tensor.numpy() for name, tensor in result.named_tensors().items()}
                results[number] = {name: [str(array.dtype), array.tolist()] for name, array in arrays.items()}
            return paddle.zeros([])

        forward_step = self._forward_step(model, forward, batches, lambda number: None, on_result)
        self._pipeline.forward(forward_step, forward_step.count, forward_step.shape)
        return [
            {name: np.array(values, dtype) for name, (dtype, values) in result.items()}
            for result in self._mesh.all_gather_object(results, "pipeline")[-1]
        ]

    def _forward_step(
        self,
        model: Decoder,
        forward: Forward[Any],
        batches: Sequence[Batch],
        begin_micro_batch: Callable[[int], None],
        on_result: Callable[[int, Any], Tensor],
    ) -> _DecoderForwardStep:
        reference_inputs = forward.reference_inputs(batches)  # first, because it may be a forward pass of its own
        if self._options.fixed_shape:
            rows, length = (max(batch.shape[axis] for batch in batches) for axis in (0, 1))
            batches = [batch.padded(rows, length) for batch in batches]
        micro_batches = list(zip(batches, reference_inputs, strict=True))
        num_padding = self._pipeline.padded_count(len(batches)) - len(batches)
        micro_batches += micro_batches[:1] * num_padding  # their loss counts for nothing
        return _DecoderForwardStep(
            model, forward, micro_batches, self._pipeline.num_stages, begin_micro_batch, on_result
        )


def _first_last_stage_group(mesh: Mesh) -> Any:
    """Return the group of these two stages, None on the others; every rank must call it."""
    made = []
    for pp_group in mesh.topology.groups("pipeline"):
        ranks = [pp_group[0], pp_group[-1]]
        made.append((ranks, dist.new_group(ranks)))
    return next((group for ranks, group in made if mesh.rank in ranks), None)


class _DecoderForwardStep:
    """The `ForwardStep` of some micro-batches of a decoder.

    Only hidden states travel between stages. Every stage has the batches and takes from them by name what it needs: the
    first what the embedding reads, each what its layers share, the last what the loss head reads.

    Args:
        micro_batches: batches, each with its reference input.
        on_result: called with the number of a micro-batch and the result of its head; returns what is minimised.
    """

    def __init__(
        self,
        model: Decoder,
        forward: Forward[Any],
        micro_batches: Sequence[tuple[Batch, Any]],
        num_stages: int,
        begin_micro_batch: Callable[[int], None],
        on_result: Callable[[int, Any], Tensor],
    ) -> None:
        self._model, self._forward, self._num_stages = model, forward, num_stages
        self._micro_batches, self._on_result = micro_batches, on_result
        self.begin_micro_batch = begin_micro_batch
        self._context: BatchContext | None = None  # of the chunk that was computed last

    @property
    def count(self) -> int:
        return len(self._micro_batches)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._micro_batches[0][0].shape

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        return ()

    def forward(self, chunk: int, number: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        batch, _ = self._micro_batches[number]
        hidden_BSH = self._model.embed(embedding_inputs(self._model, batch)) if chunk == 0 else tensors[0]
        self._context = batch_context(self._model, batch, dense_mask=self._forward.dense_mask)
        return (self._model.forward_layers(hidden_BSH, self._context, chunk // self._num_stages),)

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        batch, reference_input = self._micro_batches[number]
        assert self._context is not None
        result = self._forward.loss_head(self._model, tensors[0], self._context, batch, reference_input)
        return self._on_result(number, result)


def _sum_router_metrics(
    reported: Sequence[tuple[Mapping[str, float], Mapping[str, int]]],
) -> dict[str, tuple[Tensor, int]]:
    """Add up what the routers of all stages have reported of one micro-batch: sums and numbers of routers, by name."""
    names = sorted({name for totals, _ in reported for name in totals})
    return {
        name: (
            paddle.to_tensor(sum(totals.get(name, 0.0) for totals, _ in reported), dtype="float64"),
            sum(counts.get(name, 0) for _, counts in reported),
        )
        for name in names
    }


def _on_host(metrics: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return 0-d tensors as numbers, in one transfer from the device."""
    tensors = [tensor.astype("float64").reshape([]) for of in metrics for tensor in of.values()]
    numbers = iter(paddle.stack(tensors).numpy().tolist() if tensors else [])
    return [{name: next(numbers) for name in of} for of in metrics]


# Generation with a pipeline: one forward pass at a time goes through all stages.


class PipelineParallelDecoder:
    """A pipeline with the interface that `inference.generation` needs of a decoder.

    All stages call it together with the same tokens, each with its own key-value cache. All get the same logits, and so
    choose the same tokens.
    """

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

    def __call__(self, input_ids_BS: Tensor, position_ids_BS: Tensor, plan: Any, **inputs: Tensor) -> Tensor:
        """Return hidden states [B, S, H] after the final norm on the last stage; on others only the shape is right.

        The arguments are those of `Decoder.forward`.
        """
        context = self._local_decoder.context(position_ids_BS, plan)
        shape = [*input_ids_BS.shape, self.config.hidden_size]
        hidden_BSH = (
            self._local_decoder.embed({"input_ids": input_ids_BS, **inputs})
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
        """Return logits [T, V] on every stage."""
        empty = [rows_TH.shape[0], self.config.vocab_size]
        logits_TV = (
            self._local_decoder.head(rows_TH)
            if self._local_decoder.pipeline_stage.last
            else paddle.empty(empty, self._dtype)
        )
        return self._broadcast(logits_TV, self._num_stages - 1)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the owner's tensor on every stage."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self._group.ranks[owner], group=self._group)
        return tensor
