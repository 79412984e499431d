"""Ranks of which one of each pipeline and tensor group reads the data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle.distributed as dist

from erniekit.build import data
from erniekit.build.data import broadcast_dataset_index, dp_rank_of, reads_data
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.loader import prefetch
from erniekit.data.sampler import StepPlan
from erniekit.data.token_cache import TokenArrays
from erniekit.distributed.init import init_mesh
from erniekit.distributed.topology import Topology

STEPS = 5
OPTIONS: dict[str, Any] = {"max_seq_len": 32, "packing": True, "greedy": True, "window": 100, "batch_size": 2}


def some_samples() -> Dataset:
    """Two sources of samples whose tokens are their own numbers."""
    parts, generator = [], np.random.default_rng(3)
    for number in range(2):
        lengths = generator.integers(1, 33, 40)
        tokens = np.repeat(np.arange(40, dtype=np.int32) + 100 * number, lengths)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        counts = {"read": 40, "dropped": 0, "long_prompts": 0, "truncated": 0, "split": 0, "targets": len(tokens)}
        metadata = {"counts": counts, "unused_fields": []}
        parts.append(TokenArrays(tokens, tokens, offsets, np.arange(1, 41, dtype=np.int32), metadata))
    return Dataset([Source("a.jsonl", "text"), Source("b.jsonl", "text")], parts, pad_id=0, fingerprint="f")


def read_together(distributed: int, workers: int, degrees: dict[str, int]) -> dict[str, Any]:
    """The micro-batches that this rank works on, and how many samples it has read itself."""
    topology = Topology.from_degrees(dist.ParallelEnv().world_size, **degrees)
    config: Any = SimpleNamespace(acceleration=SimpleNamespace(distributed_dataloader=distributed))
    reads = reads_data(config, topology, dist.ParallelEnv().rank)
    own = some_samples() if reads else None
    mesh = init_mesh(topology, timeout=60)
    data.audio_of_model = lambda config: None  # there is no model
    dataset = broadcast_dataset_index(config, mesh, own)
    samples_read = 0
    sample = dataset.sample

    def counted(index: int, epoch: int) -> Any:
        nonlocal samples_read
        samples_read += 1
        return sample(index, epoch)

    dataset.sample = counted  # type: ignore[method-assign]
    dp_rank = dp_rank_of(config, mesh)
    plan = StepPlan(dataset, **OPTIONS, accumulation=4 // topology.dp_world_size, **vars(dp_rank))
    evaluation = EvaluationPlan(dataset, **OPTIONS, **vars(dp_rank))
    steps = list(prefetch(plan, 0, workers if reads else 0, STEPS))
    held_out = list(evaluation.local_steps(7))
    return {
        "reader": mesh.dp_rank,
        "steps": [[[batch.samples, batch.input_ids.tolist()] for batch in batches] for batches in steps],
        "evaluation": [[step, batch.samples, batch.labels.tolist()] for step, batch in held_out],
        "described": plan.describe(STEPS) + str(dataset.report) + dataset.location(57),
        "samples read": samples_read,
    }
