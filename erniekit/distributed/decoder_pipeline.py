"""A decoder whose parts are the stages of a pipeline: how `Ranks.run` and `Ranks.measure` are done there.

What travels from run to run: hidden states, position ids, FlashMask's indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from erniekit.distributed.mesh import Mesh
from erniekit.distributed.pipeline import Pipeline, PipelineOptions
from erniekit.distributed.stages import layer_chunks
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder import Decoder, PipelineStage
from erniekit.model.decoder_layer import BatchContext
from erniekit.model.tensor_parallel import TensorParallel
from erniekit.training.collectives import ForwardFunction
from erniekit.training.objectives.forward import DecoderForward, DecoderLoss, LossFunction, MicroBatchLoss

BATCHES_PER_STAGE = 4  # for each stage: then stages wait for less than a fifth of the time


def build_pipeline_stage(layers: int, mesh: Mesh, method: str | tuple[int, ...], tail: int = 0) -> PipelineStage | None:
    """What this rank has of a stack of so many decoder layers; see `layer_chunks`. None without a pipeline."""
    if mesh.topology.pipeline == 1:
        return None
    num_stages, pp_stage = mesh.topology.pipeline, mesh.coords.pipeline
    chunks = layer_chunks(layers, mesh.topology, method=method, tail=tail)
    return PipelineStage(tuple(chunks[pp_stage::num_stages]), first=pp_stage == 0, last=pp_stage == num_stages - 1)


class DecoderPipeline:
    """This rank's stage; it serves every decoder that is cut in the same way (a reference model, too).

    Attributes:
        embedding_group: the first and the last stage, which both have the embedding; None where only the first has it.

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
        loss: LossFunction,
        batches: Sequence[Any],
        begin_micro_batch: Callable[[int], None],
        units: float,
    ) -> list[MicroBatchLoss]:
        """See `Ranks.run`."""
        assert isinstance(loss, DecoderLoss), "a pipeline needs a loss in two parts"
        results: list[dict[str, Tensor]] = [{}] * len(batches)

        def on_result(number: int, result: MicroBatchLoss) -> Tensor:
            if number >= len(batches):
                return result.loss_sum * 0.0
            metrics = {"loss_sum": result.loss_sum, **result.metric_sums}
            results[number] = {name: value.detach() for name, value in metrics.items()}
            return result.loss_sum / units

        def begin_padded_micro_batch(number: int) -> None:
            begin_micro_batch(number if number < len(batches) else 0)
            if number >= len(batches):
                model.balance.loss_weight = 0.0

        forward_step = self._forward_step(model, loss.forward, batches, begin_padded_micro_batch, on_result)
        self._pipeline.train(forward_step, forward_step.count, forward_step.shape)
        reported = [model.balance.reported(number) for number in range(len(batches))]
        own = {
            "results": _on_host(results),
            "totals": _on_host([{name: total for name, (total, _) in of.items()} for of in reported]),
            "counts": [{name: count for name, (_, count) in of.items()} for of in reported],
        }
        of_stages = self._mesh.all_gather_object(own, "pipeline")
        losses = []
        for number, metrics in enumerate(of_stages[-1]["results"]):
            sums = {name: paddle.to_tensor(value, dtype="float64") for name, value in metrics.items()}
            routers = [(of_stage["totals"][number], of_stage["counts"][number]) for of_stage in of_stages]
            losses.append(
                loss.with_router_metrics(
                    MicroBatchLoss(sums.pop("loss_sum"), sums), _sum_router_metrics(routers), batches[number]
                )
            )
        return losses

    def forward_only(
        self, model: Decoder, measured: ForwardFunction, batches: Sequence[Any]
    ) -> list[Mapping[str, np.ndarray]]:
        """See `Ranks.measure`."""
        assert isinstance(measured, DecoderForward), "a pipeline needs a pass in two parts"
        results: list[Any] = [None] * len(batches)

        def on_result(number: int, result: Mapping[str, Tensor]) -> Tensor:
            if number < len(batches):
                results[number] = {name: [str(of.numpy().dtype), of.numpy().tolist()] for name, of in result.items()}
            return paddle.zeros([])

        forward_step = self._forward_step(model, measured, batches, lambda number: None, on_result)
        self._pipeline.forward(forward_step, forward_step.count, forward_step.shape)
        return [
            {name: np.array(values, dtype) for name, (dtype, values) in result.items()}
            for result in self._mesh.all_gather_object(results, "pipeline")[-1]
        ]

    def _forward_step(
        self,
        model: Decoder,
        decoder_forward: DecoderForward[Any],
        batches: Sequence[Any],
        begin_micro_batch: Callable[[int], None],
        on_result: Callable[[int, Any], Tensor],
    ) -> _DecoderForwardStep:
        reference_inputs = decoder_forward.reference_inputs(batches)  # first: it may be a pass of its own
        if self._options.fixed_shape:
            rows, length = (max(batch.input_ids.shape[axis] for batch in batches) for axis in (0, 1))
            batches = [batch.padded(rows, length) for batch in batches]
        num_padding = self._pipeline.padded_count(len(batches)) - len(
            batches
        )  # the first one again, which counts for nothing
        batches_and_references = [
            *zip(batches, reference_inputs, strict=True),
            *[(batches[0], reference_inputs[0])] * num_padding,
        ]
        return _DecoderForwardStep(
            model, decoder_forward, batches_and_references, self._pipeline.num_stages, begin_micro_batch, on_result
        )


def _first_last_stage_group(mesh: Mesh) -> Any:
    """The group of these stages; of the others, which must call this too, None."""
    made = []
    for pp_group in mesh.topology.groups("pipeline"):
        ranks = [pp_group[0], pp_group[-1]]
        made.append((ranks, dist.new_group(ranks)))
    return next((group for ranks, group in made if mesh.rank in ranks), None)


class _DecoderForwardStep:
    """A pass of micro-batches, as a `Pipeline` has it done."""

    def __init__(
        self,
        model: Decoder,
        decoder_forward: DecoderForward[Any],
        batches_and_references: Sequence[tuple[Any, Any]],
        num_stages: int,
        begin_micro_batch: Callable[[int], None],
        on_result: Callable[[int, Any], Tensor],
    ) -> None:
        self._model, self._decoder_forward, self._batches_and_references, self._num_stages, self._on_result = (
            model,
            decoder_forward,
            batches_and_references,
            num_stages,
            on_result,
        )
        self.begin_micro_batch = begin_micro_batch
        self._context: BatchContext | None = None  # of the run that was last

    @property
    def count(self) -> int:
        return len(self._batches_and_references)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._batches_and_references[0][0].input_ids.shape

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        batch, _ = self._batches_and_references[number]
        return tuple(map(paddle.to_tensor, (batch.input_ids, batch.position_ids, batch.startend_row_indices)))

    def forward(self, chunk: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, positions, indices = tensors
        if chunk == 0:
            hidden = self._model.embedding(hidden)
        self._context = self._decoder_forward.context(self._model, positions, indices.numpy())
        return self._model.forward_layers(hidden, self._context, chunk // self._num_stages), positions, indices

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        batch, reference_input = self._batches_and_references[number]
        assert self._context is not None
        return self._on_result(
            number, self._decoder_forward.loss_head(self._model, tensors[0], self._context, batch, reference_input)
        )


def _sum_router_metrics(
    reported: Sequence[tuple[Mapping[str, float], Mapping[str, int]]],
) -> dict[str, tuple[Tensor, int]]:
    """What routers of all stages have reported of one micro-batch: sums and their numbers, by name."""
    names = sorted({name for totals, _ in reported for name in totals})
    return {
        name: (
            paddle.to_tensor(sum(totals.get(name, 0.0) for totals, _ in reported), dtype="float64"),
            sum(counts.get(name, 0) for _, counts in reported),
        )
        for name in names
    }


def _on_host(metrics: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """0-d tensors as numbers, in one transfer from the device."""
    tensors = [tensor.astype("float64").reshape([]) for of in metrics for tensor in of.values()]
    numbers = iter(paddle.stack(tensors).numpy().tolist() if tensors else [])
    return [{name: next(numbers) for name in of} for of in metrics]


# Answers of a decoder whose parts are the stages of a pipeline: one pass at a time goes through all of them.


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
