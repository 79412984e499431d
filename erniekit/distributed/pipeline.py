"""Micro-batches through the stages of a pipeline, by fleet's schedulers: 1F1B, or interleaved with more runs a stage.

This module knows no model: `ForwardStep` says what the runs compute. The first tensor of a run has a gradient, which
flows
back; what travels beside it (positions, FlashMask's indices) has none.
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
    """What one pass of micro-batches computes. `number` counts them from 0."""

    def begin_micro_batch(self, number: int) -> None:
        """Called before anything of a micro-batch is computed here, forward or backward: other ones lie between."""
        ...

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        """What the first run gets; on the first stage only."""
        ...

    def forward(self, chunk: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What a run of this stage makes of what it gets: first the one tensor that has a gradient."""
        ...

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        """What is minimised of a micro-batch, 0-d, from what the last run gave; on the last stage only.

        Its gradients are added up as they are; they are not averaged.
        """
        ...


@dataclass(frozen=True)
class PipelineOptions:
    """How stages exchange tensors. Nothing of it changes a result.

    Attributes:
        fixed_shape: all micro-batches of a pass have tensors of the same shapes, which are sent once; otherwise each
            has its own, which are sent with every tensor.
        forget_shapes: send the shapes again in every pass.
        partial: ranks of a tensor-parallel group, which have the same tensors, send a part each and join them.
        batched: sends and receives of a moment are handed to the backend as one.
        overlapped: an interleaved schedule computes while tensors are on their way.
        unbalanced: an interleaved schedule for numbers of micro-batches that the stages do not divide.
        timed: fleet measures every phase and prints the times.
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
        """What the words of `pipeline_parallel_config` ask for."""
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
    """This rank's stage. `fleet.init` has made the groups.

    Args:
        num_model_chunks: runs of each stage; run r belongs to stage r % stages.
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
        """Whether this stage has the first run."""
        return self.pp_stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last run."""
        return self.pp_stage == self.num_stages - 1

    def padded_count(self, count: int) -> int:
        """The smallest number of micro-batches, `count` or more, for which there is a schedule."""
        if self.num_model_chunks == 1 or count >= 2 * self.num_stages:
            return count
        return self.num_stages if count <= self.num_stages else 2 * self.num_stages

    def train(self, forward_step: ForwardStep, count: int, shapes: Hashable = None) -> None:
        """`count` micro-batches forward and backward; gradients add up in the parameters that `work` uses.

        Args:
            count: a number that is `fitting`, the same on all stages.
            shapes: anything that changes when shapes of tensors do, the same on all stages.
        """
        engine = self._prepare(forward_step, count, (True, shapes))
        engine.set_virtual_pipeline_rank(0)
        engine.forward_backward_pipeline(self._data(forward_step, count), None)
        self._forward_step = None

    def forward(self, forward_step: ForwardStep, count: int, shapes: Hashable = None) -> None:
        """The same without gradients, forward only."""
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
        """fleet's scheduler for so many micro-batches, as `fleet.distributed_model` chooses it."""
        engine_class = PipelineParallel
        if self.num_model_chunks > 1:
            few = VPPFhenBInBalancedMemory if self._options.unbalanced else PipelineParallelWithInterleaveFthenB
            engine_class = few if count < 2 * self.num_stages else PipelineParallelWithInterleave
        if engine_class not in self._engines:
            strategy = _strategy(self._options, count)
            self._engines[engine_class] = engine_class(self._layers(), self._groups, strategy)
        return self._engines[engine_class]

    def _layers(self) -> PipelineLayer:
        """One layer for each run, so that fleet has nothing left to cut."""
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
        """What fleet takes one by one: on the first stage inputs, on the last numbers, which stand for labels."""
        for number in range(count):
            micro_batch_id = paddle.to_tensor([number])
            yield (*forward_step.inputs(number), micro_batch_id) if self.is_first else None, micro_batch_id

    def _loss(self, outputs: tuple[Tensor, ...], micro_batch_id: Tensor) -> Tensor:
        forward_step, number = self._current_step(), int(micro_batch_id.item())
        forward_step.begin_micro_batch(number)
        # fleet passes a loss on as float32; gradients keep their precision
        return _call_before_backward(forward_step.loss(number, outputs[:-1]).astype("float32"), forward_step, number)


class _ModelChunk(nn.Layer):
    """A run of a stage as fleet calls it. The number of the micro-batch is the last of its tensors."""

    def __init__(self, number: int, forward_step: Callable[[], ForwardStep]) -> None:
        super().__init__()
        self._number, self._current_step = number, forward_step

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        forward_step, micro_batch_id = self._current_step(), tensors[-1]
        number = int(micro_batch_id.item())
        forward_step.begin_micro_batch(number)
        first, *others = forward_step.forward(self._number, tensors[:-1])
        if paddle.is_grad_enabled():
            if first.stop_gradient:  # nothing is trained up to here; fleet passes back a gradient nevertheless
                first = first.detach()
                first.stop_gradient = False
            first = _call_before_backward(first, forward_step, number)
        return first, *others, micro_batch_id


class _BeforeBackward(PyLayer):
    """The value unchanged; its backward pass comes first and says whose turn it is."""

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
