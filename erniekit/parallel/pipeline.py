"""Micro-batches through the stages of a pipeline, by fleet's schedulers: 1F1B, or interleaved with more runs a stage.

This module knows no model: `Work` says what the runs compute. The first tensor of a run has a gradient, which flows
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


class Work(Protocol):
    """What one pass of micro-batches computes. `number` counts them from 0."""

    def begin(self, number: int) -> None:
        """Called before anything of a micro-batch is computed here, forward or backward: other ones lie between."""
        ...

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        """What the first run gets; on the first stage only."""
        ...

    def forward(self, run: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
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
    def from_words(cls, words: Collection[str], *, fixed_shape: bool = True) -> PipelineOptions:
        """What the words of `pipeline_parallel_config` ask for."""
        return cls(
            fixed_shape=fixed_shape and "disable_p2p_cache_shape" not in words,
            forget_shapes="enable_clear_every_step_cache" in words,
            partial="disable_partial_send_recv" not in words,
            batched="disable_batch_p2p_comm" not in words and "enable_overlap_p2p_comm" not in words,
            overlapped="enable_overlap_p2p_comm" in words,
            unbalanced="best_unbalanced_scheduler" in words,
            timed="enable_timer" in words,
        )


class Pipeline:
    """This rank's stage. `fleet.init` has made the groups.

    Args:
        virtual: runs of each stage; run r belongs to stage r % stages.
    """

    def __init__(self, virtual: int = 1, options: PipelineOptions | None = None) -> None:
        self._groups = fleet.get_hybrid_communicate_group()
        self.stages: int = self._groups.get_pipe_parallel_world_size()
        self.stage: int = self._groups.get_stage_id()
        self.virtual = virtual
        self._options = options or PipelineOptions()
        self._engines: dict[type[PipelineParallel], PipelineParallel] = {}
        self._shapes: Hashable = None
        self._work: Work | None = None

    @property
    def is_first(self) -> bool:
        """Whether this stage has the first run."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the last run."""
        return self.stage == self.stages - 1

    def fitting(self, count: int) -> int:
        """The smallest number of micro-batches, `count` or more, for which there is a schedule."""
        if self.virtual == 1 or count >= 2 * self.stages:
            return count
        return self.stages if count <= self.stages else 2 * self.stages

    def train(self, work: Work, count: int, shapes: Hashable = None) -> None:
        """`count` micro-batches forward and backward; gradients add up in the parameters that `work` uses.

        Args:
            count: a number that is `fitting`, the same on all stages.
            shapes: anything that changes when shapes of tensors do, the same on all stages.
        """
        engine = self._ready(work, count, (True, shapes))
        engine.set_virtual_pipeline_rank(0)
        engine.forward_backward_pipeline(self._data(work, count), None)
        self._work = None

    def forward(self, work: Work, count: int, shapes: Hashable = None) -> None:
        """The same without gradients, forward only."""
        engine = self._ready(work, count, (False, shapes))
        with paddle.no_grad():
            engine.eval_batch(self._data(work, count), compute_loss=True)
        self._work = None

    def _ready(self, work: Work, count: int, shapes: Hashable) -> PipelineParallel:
        assert count == self.fitting(count), f"there is no schedule for {count} micro-batches"
        engine = self._engine(count)
        engine.accumulate_steps = count
        engine._init_user_hooks()  # fleet counts on as many calls of its hooks as there are micro-batches
        if shapes != self._shapes or not self._options.fixed_shape:
            for each in self._engines.values():
                each._p2p_helper = P2pHelper(each._using_cache, each._dynamic_shape)
        self._shapes, self._work = shapes, work
        return engine

    def _engine(self, count: int) -> PipelineParallel:
        """fleet's scheduler for so many micro-batches, as `fleet.distributed_model` chooses it."""
        kind = PipelineParallel
        if self.virtual > 1:
            few = VPPFhenBInBalancedMemory if self._options.unbalanced else PipelineParallelWithInterleaveFthenB
            kind = few if count < 2 * self.stages else PipelineParallelWithInterleave
        if kind not in self._engines:
            strategy = _strategy(self._options, count)
            self._engines[kind] = kind(self._layers(), self._groups, strategy)
        return self._engines[kind]

    def _layers(self) -> PipelineLayer:
        """One layer for each run, so that fleet has nothing left to cut."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no stages share weights
            return PipelineLayer(
                [LayerDesc(_Run, number, self._current) for number in range(self.stages * self.virtual)],
                loss_fn=self._loss,
                topology=self._groups.topology(),
                seg_method=f"layer:{_Run.__name__}",
                num_virtual_pipeline_stages=self.virtual if self.virtual > 1 else None,
            )

    def _current(self) -> Work:
        assert self._work is not None
        return self._work

    def _data(self, work: Work, count: int) -> Iterator[tuple[tuple[Tensor, ...] | None, Tensor]]:
        """What fleet takes one by one: on the first stage inputs, on the last numbers, which stand for labels."""
        for number in range(count):
            place = paddle.to_tensor([number])
            yield (*work.inputs(number), place) if self.is_first else None, place

    def _loss(self, outputs: tuple[Tensor, ...], place: Tensor) -> Tensor:
        work, number = self._current(), int(place.item())
        work.begin(number)
        # fleet passes a loss on as float32; gradients keep their precision
        return _beginning_backward(work.loss(number, outputs[:-1]).astype("float32"), work, number)


class _Run(nn.Layer):
    """A run of a stage as fleet calls it. The number of the micro-batch is the last of its tensors."""

    def __init__(self, number: int, work: Callable[[], Work]) -> None:
        super().__init__()
        self._number, self._current = number, work

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        work, place = self._current(), tensors[-1]
        number = int(place.item())
        work.begin(number)
        first, *others = work.forward(self._number, tensors[:-1])
        if paddle.is_grad_enabled():
            if first.stop_gradient:  # nothing is trained up to here; fleet passes back a gradient nevertheless
                first = first.detach()
                first.stop_gradient = False
            first = _beginning_backward(first, work, number)
        return first, *others, place


class _BeginBackward(PyLayer):
    """The value unchanged; its backward pass comes first and says whose turn it is."""

    @staticmethod
    def forward(ctx, value, begin):  # type: ignore[no-untyped-def]
        ctx.begin = begin
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.begin()
        return grad


def _beginning_backward(value: Tensor, work: Work, number: int) -> Tensor:
    return value if value.stop_gradient else _BeginBackward.apply(value, lambda: work.begin(number))


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
