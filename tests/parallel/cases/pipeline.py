"""Pipelines against the same computation in one process."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import fleet

from erniekit.parallel import cpu_backend
from erniekit.parallel.pipeline import Pipeline, PipelineOptions

WIDTH = 5


class Chain:
    """Linear maps one after another, one for each run, with the same weights on all ranks."""

    def __init__(self, runs: int, lengths: list[int]) -> None:
        random = np.random.default_rng(0)
        self.weights = [
            paddle.to_tensor(random.standard_normal((WIDTH, WIDTH)), "float32", stop_gradient=False)
            for _ in range(runs)
        ]
        self.batches = [random.standard_normal((1, length, WIDTH)).astype("float32") for length in lengths]
        self.positions = [random.integers(0, 9, (1, length)) for length in lengths]
        self.losses: dict[int, float] = {}
        self.now = -1

    def begin(self, number: int) -> None:
        self.now = number

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        return paddle.to_tensor(self.batches[number]), paddle.to_tensor(self.positions[number])

    def forward(self, run: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, positions = tensors
        np.testing.assert_array_equal(positions.numpy(), self.positions[self.now])
        return paddle.tanh(paddle.matmul(x, self.weights[run])) * (1 + 0.1 * positions.unsqueeze(-1)), positions

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        loss = tensors[0].square().sum() / 7
        self.losses[number] = loss.item()
        return loss

    def gradients(self) -> list[np.ndarray | None]:
        return [None if weight.grad is None else weight.grad.numpy() for weight in self.weights]


def run_chain(virtual: int, lengths: list[int], options: dict[str, bool], tensor: int = 1) -> list[str]:
    """A pass forward, one forward and backward, and another of both; what a rank holds equals the single process's."""
    cpu_backend.apply()
    strategy = fleet.DistributedStrategy()
    stages = dist.ParallelEnv().world_size // tensor
    strategy.hybrid_configs = {"dp_degree": 1, "pp_degree": stages, "mp_degree": tensor}
    fleet.init(is_collective=True, strategy=strategy)
    pipeline = Pipeline(virtual, PipelineOptions(**options))
    runs = pipeline.stages * virtual

    alone = Chain(runs, lengths)
    for number in range(len(lengths)):
        alone.begin(number)
        tensors = alone.inputs(number)
        for run in range(runs):
            tensors = alone.forward(run, tensors)
        alone.loss(number, tensors).backward()

    chain = Chain(runs, lengths)
    shapes = tuple(lengths)
    for times in (1, 2):
        chain.losses.clear()
        pipeline.forward(chain, len(lengths), shapes)
        assert chain.losses == (alone.losses if pipeline.is_last else {})
        pipeline.train(chain, len(lengths), shapes)
        for run, (own, expected) in enumerate(zip(chain.gradients(), alone.gradients(), strict=True)):
            if run % pipeline.stages == pipeline.stage:
                np.testing.assert_allclose(own, times * expected, rtol=1e-5, atol=1e-6)
            else:
                assert own is None
    return [type(engine).__name__ for engine in pipeline._engines.values()]
