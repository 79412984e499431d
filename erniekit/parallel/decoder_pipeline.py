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

from erniekit.model.decoder import Decoder, StackPart
from erniekit.model.decoder_layer import BatchContext
from erniekit.parallel.mesh import Mesh
from erniekit.parallel.pipeline import Pipeline, PipelineOptions
from erniekit.parallel.stages import layer_runs
from erniekit.training.passes import DecoderLoss, DecoderPass, LossOfBatch, MicroLoss
from erniekit.training.ranks import Measured

BATCHES_AT_ONCE = 4  # for each stage: then stages wait for less than a fifth of the time


def stack_part(layers: int, mesh: Mesh, method: str | tuple[int, ...], tail: int = 0) -> StackPart | None:
    """What this rank has of a stack of so many decoder layers; see `layer_runs`. None without a pipeline."""
    if mesh.topology.pipeline == 1:
        return None
    stages, stage = mesh.topology.pipeline, mesh.place.pipeline
    runs = layer_runs(layers, mesh.topology, method=method, tail=tail)
    return StackPart(tuple(runs[stage::stages]), first=stage == 0, last=stage == stages - 1)


class DecoderPipeline:
    """This rank's stage; it serves every decoder that is cut in the same way (a reference model, too).

    Attributes:
        embedding_group: the first and the last stage, which both have the embedding; None where only the first has it.

    Args:
        copied_embedding: whether the last stage has a copy of the embedding.
    """

    def __init__(self, mesh: Mesh, options: PipelineOptions | None = None, *, copied_embedding: bool = False) -> None:
        options = options or PipelineOptions()
        if mesh.topology.sequence_parallel:  # then ranks of a tensor-parallel group have different tensors
            options = replace(options, partial=False)
        self._mesh, self._options = mesh, options
        self.embedding_group = _first_and_last(mesh) if copied_embedding else None
        self._pipeline = Pipeline(mesh.topology.virtual_pipeline, self._options)
        self.at_once = BATCHES_AT_ONCE * mesh.topology.pipeline

    def run(
        self, model: Decoder, loss: LossOfBatch, batches: Sequence[Any], begin: Callable[[int], None], units: float
    ) -> list[MicroLoss]:
        """See `Ranks.run`."""
        assert isinstance(loss, DecoderLoss), "a pipeline needs a loss in two parts"
        results: list[dict[str, Tensor]] = [{}] * len(batches)

        def take(number: int, result: MicroLoss) -> Tensor:
            if number >= len(batches):
                return result.loss_sum * 0.0
            figures = {"loss_sum": result.loss_sum, **result.sums}
            results[number] = {name: value.detach() for name, value in figures.items()}
            return result.loss_sum / units

        def begin_any(number: int) -> None:
            begin(number if number < len(batches) else 0)
            if number >= len(batches):
                model.balance.share = 0.0

        work = self._work(model, loss.own, batches, begin_any, take)
        self._pipeline.train(work, work.count, work.shape)
        reported = [model.balance.reported(number) for number in range(len(batches))]
        own = {
            "results": _on_host(results),
            "totals": _on_host([{name: total for name, (total, _) in of.items()} for of in reported]),
            "counts": [{name: count for name, (_, count) in of.items()} for of in reported],
        }
        of_stages = self._mesh.exchange(own, "pipeline")
        parts = []
        for number, figures in enumerate(of_stages[-1]["results"]):
            sums = {name: paddle.to_tensor(value, dtype="float64") for name, value in figures.items()}
            routers = [(of_stage["totals"][number], of_stage["counts"][number]) for of_stage in of_stages]
            parts.append(loss.with_routers(MicroLoss(sums.pop("loss_sum"), sums), _added(routers), batches[number]))
        return parts

    def measure(self, model: Decoder, measured: Measured, batches: Sequence[Any]) -> list[Mapping[str, np.ndarray]]:
        """See `Ranks.measure`."""
        assert isinstance(measured, DecoderPass), "a pipeline needs a pass in two parts"
        results: list[Any] = [None] * len(batches)

        def take(number: int, result: Mapping[str, Tensor]) -> Tensor:
            if number < len(batches):
                results[number] = {name: [str(of.numpy().dtype), of.numpy().tolist()] for name, of in result.items()}
            return paddle.zeros([])

        work = self._work(model, measured, batches, lambda number: None, take)
        self._pipeline.forward(work, work.count, work.shape)
        return [
            {name: np.array(values, dtype) for name, (dtype, values) in result.items()}
            for result in self._mesh.exchange(results, "pipeline")[-1]
        ]

    def _work(
        self,
        model: Decoder,
        passed: DecoderPass[Any],
        batches: Sequence[Any],
        begin: Callable[[int], None],
        take: Callable[[int, Any], Tensor],
    ) -> _DecoderWork:
        constants = passed.constants(batches)  # first: it may be a pass of its own
        if self._options.fixed_shape:
            rows, length = (max(batch.input_ids.shape[axis] for batch in batches) for axis in (0, 1))
            batches = [batch.padded(rows, length) for batch in batches]
        fill = self._pipeline.fitting(len(batches)) - len(batches)  # the first one again, which counts for nothing
        given = [*zip(batches, constants, strict=True), *[(batches[0], constants[0])] * fill]
        return _DecoderWork(model, passed, given, self._pipeline.stages, begin, take)


def _first_and_last(mesh: Mesh) -> Any:
    """The group of these stages; of the others, which must call this too, None."""
    made = []
    for stages in mesh.topology.groups("pipeline"):
        ranks = [stages[0], stages[-1]]
        made.append((ranks, dist.new_group(ranks)))
    return next((group for ranks, group in made if mesh.rank in ranks), None)


class _DecoderWork:
    """A pass of micro-batches, as a `Pipeline` has it done."""

    def __init__(
        self,
        model: Decoder,
        passed: DecoderPass[Any],
        given: Sequence[tuple[Any, Any]],
        stages: int,
        begin: Callable[[int], None],
        take: Callable[[int, Any], Tensor],
    ) -> None:
        self._model, self._passed, self._given, self._stages, self._take = model, passed, given, stages, take
        self.begin = begin
        self._context: BatchContext | None = None  # of the run that was last

    @property
    def count(self) -> int:
        return len(self._given)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._given[0][0].input_ids.shape

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        batch, _ = self._given[number]
        return tuple(map(paddle.to_tensor, (batch.input_ids, batch.position_ids, batch.startend_row_indices)))

    def forward(self, run: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, positions, indices = tensors
        if run == 0:
            hidden = self._model.embedding(hidden)
        self._context = self._passed.context(self._model, positions, indices.numpy())
        return self._model.through_layers(hidden, self._context, run // self._stages), positions, indices

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        batch, constant = self._given[number]
        assert self._context is not None
        return self._take(number, self._passed.finish(self._model, tensors[0], self._context, batch, constant))


def _added(
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


def _on_host(figures: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """0-d tensors as numbers, in one transfer from the device."""
    tensors = [tensor.astype("float64").reshape([]) for of in figures for tensor in of.values()]
    numbers = iter(paddle.stack(tensors).numpy().tolist() if tensors else [])
    return [{name: next(numbers) for name in of} for of in figures]
