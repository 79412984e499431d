"""Run micro-batches through the stages of a pipeline with fleet's schedulers: 1F1B, or interleaved with several model
chunks a stage.

This module knows no model: `ForwardStep` says what the chunks compute. The first tensor that a chunk sends on has a
gradient, which flows back; the others have none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, PipelineParallel
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import (
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
)
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper


class ForwardStep(Protocol):
    """What a pipeline computes of some micro-batches. `number` counts these from 0."""

    def begin_micro_batch(self, number: int) -> None:
        """Prepare for a micro-batch. Called before each of its forward and backward computations on this stage,
        because those of other micro-batches come in between."""
        ...

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        """Return the tensors that the first chunk receives; called on the first stage only."""
        ...

    def forward(self, chunk: int, number: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what a chunk of this stage sends on: first the one tensor that has a gradient.

        Args:
            tensors: what the chunk before has sent on; of the first chunk `inputs`.
        """
        ...

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the loss of a micro-batch, 0-d, from what the last chunk has sent on; called on the last stage only.

        Gradients are added up as they are; they are not averaged.
        """
        ...


@dataclass(frozen=True)
class PipelineOptions:
    """How stages exchange tensors. No option changes a result.

    Attributes:
        fixed_shape: the tensors of all micro-batches of a pass have the same shapes, which are sent once; otherwise
            shapes are sent with every tensor.
        forget_shapes: send the shapes again in every pass.
        partial: ranks of a tensor-parallel group, which have the same tensors, send a slice each and all-gather them.
        batched: give sends and receives that belong together to the backend as one batch.
        overlapped: use an interleaved schedule that computes while tensors are sent.
        unbalanced: use an interleaved schedule for numbers of micro-batches that are no multiple of the stages.
        timed: let fleet measure every phase and print the times.
    """

    fixed_shape: bool = True
    forget_shapes: bool = False
    partial: bool = True
    batched: bool = True
    overlapped: bool = False
    unbalanced: bool = False
    timed: bool = False

    @classmethod
    def from_flags(cls, flags: Collection[str], *, fixed_shape: bool = True) -> PipelineOptions:
        """Read the flags of `pipeline_parallel_config`."""
        return cls(
            fixed_shape=fixed_shape and "disable_p2p_cache_shape" not in flags,
            forget_shapes="enable_clear_every_step_cache" in flags,
            partial="disable_partial_send_recv" not in flags,
            batched="disable_batch_p2p_comm" not in flags and "enable_overlap_p2p_comm" not in flags,
            overlapped="enable_overlap_p2p_comm" in flags,
            unbalanced="best_unbalanced_scheduler" in flags,
            timed="enable_timer" in flags,
        )


class Pipeline:
    """This rank's stage of a pipeline. `fleet.init` must have made the groups.

    Args:
        num_model_chunks: the number of chunks of each stage; chunk c belongs to stage c % stages.
    """

    def __init__(self, num_model_chunks: int = 1, options: PipelineOptions | None = None) -> None:
        self._groups = fleet.get_hybrid_communicate_group()
        self.num_stages: int = self._groups.get_pipe_parallel_world_size()
        self.pp_stage: int = self._groups.get_stage_id()
        self.num_model_chunks = num_model_chunks
        self._options = options or PipelineOptions()
        self._engines: dict[type[PipelineParallel], PipelineParallel] = {}
        self._shapes: Hashable = None
        self._forward_step: ForwardStep | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this stage has the first chunk."""
        return self.pp_stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage has the last chunk."""
        return self.pp_stage == self.num_stages - 1

    def padded_count(self, count: int) -> int:
        """Return the smallest number of micro-batches, `count` or more, for which there is a schedule."""
        if self.num_model_chunks == 1 or count >= 2 * self.num_stages:
            return count
        return self.num_stages if count <= self.num_stages else 2 * self.num_stages

    def train(self, forward_step: ForwardStep, count: int, shapes: Hashable = None) -> None:
        """Run `count` micro-batches forward and backward; gradients add up in the parameters that the step uses.

        Args:
            count: a number that `padded_count` returns, the same on all stages.
            shapes: a value that changes when the shapes of tensors do, the same on all stages.
        """
        engine = self._prepare(forward_step, count, (True, shapes))
        engine.set_virtual_pipeline_rank(0)
        engine.forward_backward_pipeline(self._data(forward_step, count), None)
        self._forward_step = None

    def forward(self, forward_step: ForwardStep, count: int, shapes: Hashable = None) -> None:
        """Run `count` micro-batches forward only, without gradients; the arguments are those of `train`."""
        engine = self._prepare(forward_step, count, (False, shapes))
        with paddle.no_grad():
            engine.eval_batch(self._data(forward_step, count), compute_loss=True)
        self._forward_step = None

    def _prepare(self, forward_step: ForwardStep, count: int, shapes: Hashable) -> PipelineParallel:
        assert count == self.padded_count(count), f"there is no schedule for {count} micro-batches"
        engine = self._engine(count)
        engine.accumulate_steps = count
        engine._init_user_hooks()  # fleet counts on as many calls of its hooks as there are micro-batches
        if shapes != self._shapes or not self._options.fixed_shape:
            for each in self._engines.values():
                each._p2p_helper = P2pHelper(each._using_cache, each._dynamic_shape)
        self._shapes, self._forward_step = shapes, forward_step
        return engine

    def _engine(self, count: int) -> PipelineParallel:
        """Return fleet's scheduler for `count` micro-batches, as `fleet.distributed_model` chooses it."""
        engine_class = PipelineParallel
        if self.num_model_chunks > 1:
            few = VPPFhenBInBalancedMemory if self._options.unbalanced else PipelineParallelWithInterleaveFthenB
            engine_class = few if count < 2 * self.num_stages else PipelineParallelWithInterleave
        if engine_class not in self._engines:
            strategy = _strategy(self._options, count)
            self._engines[engine_class] = engine_class(self._layers(), self._groups, strategy)
        return self._engines[engine_class]

    def _layers(self) -> PipelineLayer:
        """Return one layer for each chunk, so that fleet does not cut the model itself."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no stages share weights
            return PipelineLayer(
                [
                    LayerDesc(_ModelChunk, number, self._current_step)
                    for number in range(self.num_stages * self.num_model_chunks)
                ],
                loss_fn=self._loss,
                topology=self._groups.topology(),
                seg_method=f"layer:{_ModelChunk.__name__}",
                num_virtual_pipeline_stages=self.num_model_chunks if self.num_model_chunks > 1 else None,
            )

    def _current_step(self) -> ForwardStep:
        assert self._forward_step is not None
        return self._forward_step

    def _data(self, forward_step: ForwardStep, count: int) -> Iterator[tuple[tuple[Tensor, ...] | None, Tensor]]:
        """Yield what fleet takes one by one: inputs on the first stage, and numbers of micro-batches as labels."""
        for number in range(count):
            micro_batch_id = paddle.to_tensor([number])
            yield (*forward_step.inputs(number), micro_batch_id) if self.is_first else None, micro_batch_id

    def _loss(self, outputs: tuple[Tensor, ...], micro_batch_id: Tensor) -> Tensor:
        forward_step, number = self._current_step(), int(micro_batch_id.item())
        forward_step.begin_micro_batch(number)
        # fleet passes a loss on as float32; gradients keep their precision
        return _call_before_backward(forward_step.loss(number, outputs[:-1]).astype("float32"), forward_step, number)


class _ModelChunk(nn.Layer):
    """A chunk of a stage as fleet calls it. The number of the micro-batch is the last of its tensors."""

    def __init__(self, number: int, forward_step: Callable[[], ForwardStep]) -> None:
        super().__init__()
        self._number, self._current_step = number, forward_step

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        forward_step, micro_batch_id = self._current_step(), tensors[-1]
        number = int(micro_batch_id.item())
        forward_step.begin_micro_batch(number)
        first, *others = forward_step.forward(self._number, number, tensors[:-1])
        if paddle.is_grad_enabled():
            if first.stop_gradient:  # nothing is trained up to here, but fleet passes back a gradient
                first = first.detach()
                first.stop_gradient = False
            first = _call_before_backward(first, forward_step, number)
        return first, *others, micro_batch_id


class _BeforeBackward(PyLayer):
    """Return the value unchanged; in backward, call `begin_micro_batch` before the layers that made the value."""

    @staticmethod
    def forward(ctx, value, begin_micro_batch):  # type: ignore[no-untyped-def]
        ctx.begin_micro_batch = begin_micro_batch
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.begin_micro_batch()
        return grad


def _call_before_backward(value: Tensor, forward_step: ForwardStep, number: int) -> Tensor:
    return (
        value if value.stop_gradient else _BeforeBackward.apply(value, lambda: forward_step.begin_micro_batch(number))
    )


def _strategy(options: PipelineOptions, count: int) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "pp_configs": {
            "delay_scale_loss": True,  # fleet would divide every loss by the number of micro-batches
            "enable_dynamic_shape": not options.fixed_shape,
            "clear_every_step_cache": options.forget_shapes,
            "use_batch_p2p_comm": options.batched,
            "overlap_p2p_comm": options.overlapped,
            "best_unbalanced_scheduler": options.unbalanced,
            "enable_timer": options.timed,
        }
    }
    strategy.pipeline_configs = {
        "accumulate_steps": count,
        "micro_batch_size": 1,
        "p2p_cache_shape": options.fixed_shape,
        "enable_partial_send_recv": options.partial,
    }
    return strategy
