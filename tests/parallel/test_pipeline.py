"""fleet's schedules of micro-batches, on ranks: whatever the schedule, sums and gradients are those of one process."""

from __future__ import annotations

import pytest

from tests.parallel.cases.pipeline import run_chain
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.distributed

SCHEDULES = {
    "two stages": (2, 1, [4, 4, 4], {}, "PipelineParallel"),
    "a single micro-batch": (2, 1, [4], {}, "PipelineParallel"),
    "every micro-batch has its own length": (2, 1, [4, 3, 6, 2], {"fixed_shape": False}, "PipelineParallel"),
    "shapes sent in every pass": (2, 1, [4, 4], {"forget_shapes": True}, "PipelineParallel"),
    "not batched": (2, 1, [4, 4, 4], {"batched": False}, "PipelineParallel"),
    "timed": (2, 1, [4, 4], {"timed": True}, "PipelineParallel"),
    "interleaved": (4, 2, [4] * 8, {}, "PipelineParallelWithInterleave"),
    "interleaved, few micro-batches": (4, 2, [4] * 4, {}, "PipelineParallelWithInterleaveFthenB"),
    "interleaved, unbalanced": (4, 2, [4] * 9, {"unbalanced": True}, "PipelineParallelWithInterleave"),
    "interleaved, overlapped": (4, 2, [4] * 8, {"overlapped": True}, "PipelineParallelWithInterleave"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_computes_what_one_process_does(schedule: str) -> None:
    ranks, virtual, lengths, options, engine = SCHEDULES[schedule]
    found = run_ranks(run_chain, ranks, timeout=60, virtual=virtual, lengths=lengths, options=options)
    assert found == [[engine]] * ranks


@pytest.mark.parametrize("partial", [True, False])
def test_tensor_parallel_ranks_send_parts_or_wholes(partial: bool) -> None:
    run_ranks(run_chain, 4, timeout=60, virtual=1, lengths=[4, 4], options={"partial": partial}, tensor=2)
