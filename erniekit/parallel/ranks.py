"""What an optimizer step needs of the other ranks of a layout (see `training.ranks.Ranks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients_with_group

from erniekit.model.placement import Placement, placement
from erniekit.model.whole import Held, WholeTensors
from erniekit.parallel.copies import Copies
from erniekit.parallel.decoder_pipeline import DecoderPipeline
from erniekit.parallel.gathering import Gathered, axis_of
from erniekit.parallel.mesh import BATCH_AXES, Mesh
from erniekit.parallel.sharding.stage import SLICE, Stage
from erniekit.parallel.topology import AXES
from erniekit.training.gradients import fill_missing_gradients, squared_norm
from erniekit.training.passes import LossOfBatch, MicroLoss
from erniekit.training.ranks import Measured, measure_in_turn, run_in_turn

Begin = Callable[[int], None]
EMBEDDING = "model.embed_tokens.weight"


class LayoutRanks:
    """The ranks of a layout, as one of them sees them. Gradients are sums everywhere, never means.

    Args:
        parameters: the trained weights of this rank, by name.
        stage: what divides memory among the ranks of a sharding group, where there is one.
        pipeline: what runs micro-batches through the stages, where there are several.
        copies: what keeps copies on the ranks of a tensor-parallel group equal, where that is asked for.
        sum_in_backward: what sequence parallelism keeps on all ranks is added up in every backward pass, rather than
            once a step (`use_sp_callback` false).
        layout: how the run is divided, by parameter; needed where ranks write checkpoints of their own.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, Tensor],
        *,
        stage: Stage | None = None,
        pipeline: DecoderPipeline | None = None,
        copies: Copies | None = None,
        sum_in_backward: bool = False,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        self.mesh, self._stage, self._pipeline, self._copies = mesh, stage, pipeline, copies
        self.rank, self.layout = mesh.rank, layout or {"ranks": mesh.topology.world_size}
        self.at_once = pipeline.at_once if pipeline else 1
        copied = pipeline is not None and pipeline.embedding_group is not None and EMBEDDING in parameters
        self._copied = parameters[EMBEDDING].name if copied else None  # the first and the last stage have it
        self._places = {parameter.name: self._placement(name) for name, parameter in parameters.items()}
        self._summed: set[str] = set()  # added up in the backward pass
        if sum_in_backward and mesh.topology.sequence_parallel:
            for parameter in parameters.values():
                place = self._places[parameter.name]
                if place.partial and place.expert is None and not parameter.stop_gradient:
                    parameter.register_hook(self._sum_over_slices)
                    self._summed.add(parameter.name)

    @property
    def is_first(self) -> bool:
        return self.mesh.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self.mesh.sum(values, *BATCH_AXES)

    def exchange(self, value: Any) -> list[Any]:
        return self.mesh.exchange(value)

    def whole(self, own: Held) -> WholeTensors:
        return Gathered(self.mesh, Held(own.tensors, lambda name: self._weight_of(own.read(name))))

    def own_part(self, name: str, whole: np.ndarray) -> np.ndarray:
        return self.mesh.tensor.cut(whole, axis_of(name))

    def own(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: self._stage.part(weight) for name, weight in weights.items()} if self._stage else weights

    def present(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return self._stage.present(parameters) if self._stage else nullcontext()

    def run(self, model: Any, loss: LossOfBatch, batches: Sequence[Any], begin: Begin, units: float) -> list[MicroLoss]:
        run = self._pipeline.run if self._pipeline else run_in_turn
        return run(model, self._stage.wrap(loss) if self._stage else loss, batches, begin, units)

    def measure(self, model: Any, measured: Measured, batches: Sequence[Any]) -> list[Mapping[str, np.ndarray]]:
        measure = self._pipeline.measure if self._pipeline else measure_in_turn
        return measure(model, measured, batches)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add up what ranks with other samples have of a gradient, and the ranks of a tensor-parallel group."""
        if self._pipeline:  # first, since either stage may divide what it updates in another way
            copied = [tensor for tensor in parameters if tensor.name == self._copied]
            fill_missing_gradients(copied)
            self._add_up(copied, self._pipeline.embedding_group)
        if self._stage is None:
            updated = parameters
            fill_missing_gradients(updated)
        else:
            updated = self._stage.reduce_gradients()
        partial = [t for t in updated if self._place(t).partial and self._weight(t) not in self._summed]
        self._add_up(partial, self.mesh.group("tensor"))
        divided = self.mesh.topology.expert_axis == "data"  # then an expert's tokens have come from all data ranks
        others = [tensor for tensor in updated if not divided or self._place(tensor).expert is None]
        self._add_up(others, self.mesh.group("data"))
        if self._copies:
            self._copies.before_update()
        return updated

    def all_finite(self, parameters: Sequence[Tensor]) -> bool:
        if self._stage is None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        else:
            gradients = self._stage.gradients(parameters)
        wrong = np.array([float(any(not np.isfinite(float(squared_norm(gradient))) for gradient in gradients))])
        if self._stage is not None and self._stage.adds_in_passes:
            wrong = self.mesh.sum(wrong, "sharding")
        return not self.mesh.sum(self.mesh.sum(wrong, "pipeline"), "tensor")[0]

    def after_update(self) -> None:
        if self._copies:
            self._copies.after_update()

    def global_norm(self, updated: Sequence[Tensor]) -> Tensor:
        squares = [squared_norm(tensor.grad).astype("float64") for tensor in updated if self._counts(tensor)]
        own = float(paddle.stack(squares).sum()) if squares else 0.0
        total = self.mesh.sum(np.array([own]), *AXES)
        return paddle.to_tensor(np.sqrt(total[0]), dtype="float64")

    def _sum_over_slices(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.mesh.group("tensor"))
        return total

    @staticmethod
    def _weight(tensor: Tensor) -> str:
        return tensor.name.removeprefix(SLICE)

    def _place(self, tensor: Tensor) -> Placement:
        return self._places[self._weight(tensor)]

    def _weight_of(self, tensor: Tensor) -> Tensor:
        return self._stage.weight(tensor) if self._stage else tensor

    def _placement(self, name: str) -> Placement:
        topology = self.mesh.topology
        if topology.tensor == 1:
            return Placement(expert=placement(name).expert)
        place = placement(name, sequence=topology.sequence_parallel)
        if place.expert is not None and topology.expert_axis == "tensor":
            return replace(place, partial=False)  # the tokens of all ranks of the group have come to it
        return place

    def _counts(self, tensor: Tensor) -> bool:
        """Whether this rank is the one that counts these values, which several ranks may have."""
        place, first = self._place(tensor), self.mesh.is_first
        divided_by = self.mesh.topology.expert_axis if place.expert is not None else None
        same_on_tensor = place.axis is None and divided_by != "tensor"
        same_on_data = divided_by != "data"
        return not (
            (same_on_tensor and not first("tensor"))
            or (same_on_data and not first("data"))
            or (self._weight(tensor) == self._copied and not first("pipeline"))
        )

    def _add_up(self, updated: list[Tensor], group: Any) -> None:
        if group is None or not updated:
            return
        if self._stage is None:
            fused_allreduce_gradients_with_group(updated, group, scale=1.0)
            return
        for tensor in updated:  # in place: a gradient may be a view of a buffer of fleet's
            dist.all_reduce(tensor.grad, group=group)
