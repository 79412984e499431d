"""The collectives that an optimizer step needs, on the ranks of a layout (see `training.collectives.Ranks`)."""

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

from erniekit.distributed.broadcast import GatheredTensors, tp_shard_axis
from erniekit.distributed.decoder_pipeline import DecoderPipeline
from erniekit.distributed.mesh import Mesh
from erniekit.distributed.replicated import ReplicatedParameterSync
from erniekit.distributed.sharding.stage import SLICE_PREFIX, ShardingStrategy
from erniekit.distributed.topology import AXES, BATCH_AXES
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.plain_decoder import EMBEDDING
from erniekit.model.architectures.sharding import Placement
from erniekit.model.local_tensors import FullTensors, LocalTensors
from erniekit.training.collectives import forward_backward_no_pipelining, forward_only_no_pipelining
from erniekit.training.gradients import fill_missing_gradients, squared_norms
from erniekit.training.objectives.forward import Forward, HeadResult, Loss, MicroBatchLoss

BeginMicroBatch = Callable[[int], None]


class LayoutRanks:
    """The ranks of a layout, as one of them sees them. Gradients are sums everywhere, never means.

    Args:
        parameters: the trained weights of this rank, by name.
        architecture: the model's, which says how each of its weights is sharded.
        sharding_strategy: shards optimizer states, gradients or parameters; None without a sharding group.
        pipeline: runs micro-batches through the pipeline stages; None where there is only one.
        replicated_sync: keeps replicated parameters equal on the ranks of a tensor-parallel group, where the run asks
            for it.
        sum_in_backward: all-reduce the gradients of what sequence parallelism replicates in every backward pass, and
            not once a step (`use_sp_callback` false).
        layout: the degrees of parallelism, by parameter; needed where ranks write checkpoints of their own.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, Tensor],
        architecture: Architecture,
        *,
        sharding_strategy: ShardingStrategy | None = None,
        pipeline: DecoderPipeline | None = None,
        replicated_sync: ReplicatedParameterSync | None = None,
        sum_in_backward: bool = False,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        self.mesh, self._sharding_strategy, self._pipeline, self._replicated_sync = (
            mesh,
            sharding_strategy,
            pipeline,
            replicated_sync,
        )
        self._architecture = architecture
        self.rank, self.layout = mesh.rank, layout or {"ranks": mesh.topology.world_size}
        self.num_forward_batches = pipeline.num_forward_batches if pipeline else 1
        tied = pipeline is not None and pipeline.embedding_group is not None
        path = architecture.file_name(EMBEDDING).removesuffix("weight")  # the weight, or beside adapters its new rows
        self._tied_embedding = {  # the first and the last stage have it
            parameter.name for name, parameter in parameters.items() if tied and name.startswith(path)
        }
        self._placements = {parameter.name: self._placement(name) for name, parameter in parameters.items()}
        self._reduced_in_backward: set[str] = set()  # added up in the backward pass
        if sum_in_backward and mesh.topology.sequence_parallel:
            for parameter in parameters.values():
                weight_placement = self._placements[parameter.name]
                if weight_placement.partial and weight_placement.expert is None and not parameter.stop_gradient:
                    parameter.register_hook(self._all_reduce_over_tp)
                    self._reduced_in_backward.add(parameter.name)

    @property
    def is_main_process(self) -> bool:
        return self.mesh.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self.mesh.sum(values, *BATCH_AXES)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.mesh.all_gather_object(value)

    def full_tensors(self, local: LocalTensors) -> FullTensors:
        full_params = LocalTensors(local.tensors, lambda name: self._full_param(local.read(name)))
        return GatheredTensors(self.mesh, full_params, self._architecture)

    def local_shard(self, name: str, full: np.ndarray) -> np.ndarray:
        return self.mesh.tp.local_shard(full, tp_shard_axis(self._architecture, name))

    def local_shards(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return (
            {name: self._sharding_strategy.local_param(weight) for name, weight in weights.items()}
            if self._sharding_strategy
            else weights
        )

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return self._sharding_strategy.gather_params(parameters) if self._sharding_strategy else nullcontext()

    def forward_backward(
        self, model: Any, loss: Loss, batches: Sequence[Any], begin_micro_batch: BeginMicroBatch, units: float
    ) -> list[MicroBatchLoss]:
        if self._pipeline:  # only stage 1 of sharding goes with it, which takes a loss as it is
            return self._pipeline.forward_backward(model, loss, batches, begin_micro_batch, units)
        function = self._sharding_strategy.wrap(loss) if self._sharding_strategy else loss
        return forward_backward_no_pipelining(model, function, batches, begin_micro_batch, units)

    def forward_only(
        self, model: Any, forward: Forward[HeadResult], batches: Sequence[Any]
    ) -> list[Mapping[str, np.ndarray]]:
        forward_only = self._pipeline.forward_only if self._pipeline else forward_only_no_pipelining
        return forward_only(model, forward, batches)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """All-reduce gradients over the ranks with other samples, and partial ones over the tensor-parallel group."""
        if self._pipeline:  # first, since either stage may divide what it updates in another way
            tied = [tensor for tensor in parameters if tensor.name in self._tied_embedding]
            fill_missing_gradients(tied)
            self._all_reduce_gradients(tied, self._pipeline.embedding_group)
        if self._sharding_strategy is None:
            updated = parameters
            fill_missing_gradients(updated)
        else:
            updated = self._sharding_strategy.reduce_gradients()
        partial = [
            t
            for t in updated
            if self._placement_of(t).partial and self._weight_name(t) not in self._reduced_in_backward
        ]
        self._all_reduce_gradients(partial, self.mesh.group("tensor"))
        experts_across_data = (
            self.mesh.topology.expert_axis == "data"
        )  # then an expert's tokens have come from all data ranks
        others = [tensor for tensor in updated if not experts_across_data or self._placement_of(tensor).expert is None]
        self._all_reduce_gradients(others, self.mesh.group("data"))
        if self._replicated_sync:
            self._replicated_sync.before_update()
        return updated

    def all_finite(self, parameters: Sequence[Tensor]) -> bool:
        if self._sharding_strategy is None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        else:
            gradients = self._sharding_strategy.gradients(parameters)
        non_finite = np.array([float(bool(gradients) and not np.isfinite(squared_norms(gradients).numpy()).all())])
        if self._sharding_strategy is not None and self._sharding_strategy.reduces_in_backward:
            non_finite = self.mesh.sum(non_finite, "sharding")
        return not self.mesh.sum(self.mesh.sum(non_finite, "pipeline"), "tensor")[0]

    def after_update(self) -> None:
        if self._replicated_sync:
            self._replicated_sync.after_update()

    def global_norm(self, updated: Sequence[Tensor]) -> Tensor:
        counted = [tensor.grad for tensor in updated if self._counts_in_norm(tensor)]
        own = float(squared_norms(counted).astype("float64").sum()) if counted else 0.0
        total = self.mesh.sum(np.array([own]), *AXES)
        return paddle.to_tensor(np.sqrt(total[0]), dtype="float64")

    def _all_reduce_over_tp(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self.mesh.group("tensor"))
        return total

    @staticmethod
    def _weight_name(tensor: Tensor) -> str:
        return tensor.name.removeprefix(SLICE_PREFIX)

    def _placement_of(self, tensor: Tensor) -> Placement:
        return self._placements[self._weight_name(tensor)]

    def _full_param(self, tensor: Tensor) -> Tensor:
        return self._sharding_strategy.full_param(tensor) if self._sharding_strategy else tensor

    def _placement(self, name: str) -> Placement:
        topology = self.mesh.topology
        if topology.tensor == 1:
            return Placement(expert=self._architecture.placement(name).expert)
        weight_placement = self._architecture.placement(name, sequence_parallel=topology.sequence_parallel)
        if weight_placement.expert is not None and topology.expert_axis == "tensor":
            return replace(weight_placement, partial=False)  # the tokens of all ranks of the group have come to it
        return weight_placement

    def _counts_in_norm(self, tensor: Tensor) -> bool:
        """Return whether this rank is the one that counts these values, which several ranks may have."""
        weight_placement, first = self._placement_of(tensor), self.mesh.is_first
        divided_by = self.mesh.topology.expert_axis if weight_placement.expert is not None else None
        same_on_tensor = weight_placement.axis is None and divided_by != "tensor"
        same_on_data = divided_by != "data"
        return not (
            (same_on_tensor and not first("tensor"))
            or (same_on_data and not first("data"))
            or (self._weight_name(tensor) in self._tied_embedding and not first("pipeline"))
        )

    def _all_reduce_gradients(self, updated: list[Tensor], group: Any) -> None:
        if group is None or not updated:
            return
        if self._sharding_strategy is None:
            fused_allreduce_gradients_with_group(updated, group, scale=1.0)
            return
        for tensor in updated:  # in place: a gradient may be a view of a buffer of fleet's
            dist.all_reduce(tensor.grad, group=group)
