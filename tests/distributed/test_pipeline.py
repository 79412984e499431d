"""fleet's schedules of micro-batches, on ranks: whatever the schedule, sums and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.distributed.cases.pipeline import break_a_gradient, check_decoder, run_chain
from tests.distributed.ranks import run_ranks

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
    "interleaved, few and unbalanced": (4, 2, [4] * 4, {"unbalanced": True}, "VPPFhenBInBalancedMemory"),
    "interleaved, unbalanced": (4, 2, [4] * 9, {"unbalanced": True}, "PipelineParallelWithInterleave"),
    "interleaved, overlapped": (4, 2, [4] * 8, {"overlapped": True}, "PipelineParallelWithInterleave"),
}


def chosen(cases: Iterable[str], plain: set[str]) -> list[Any]:
    """All of them; the plain run takes a few."""
    return [case if case in plain else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


PLAIN_SCHEDULES = {"two stages", "every micro-batch has its own length", "interleaved, overlapped"}
PLAIN_RUNS = {
    "interleaved",
    "a list of stages, adapters",
    "experts, predictions ahead",
    "dropout and recomputation",
    "preferences, adapters aside",
    "with sequence parallelism",
}


@pytest.mark.parametrize("schedule", chosen(SCHEDULES, PLAIN_SCHEDULES))
def test_a_pipeline_computes_what_one_process_does(schedule: str) -> None:
    ranks, num_model_chunks, lengths, options, engine = SCHEDULES[schedule]
    found = run_ranks(run_chain, ranks, timeout=60, num_model_chunks=num_model_chunks, lengths=lengths, options=options)
    assert found == [[engine]] * ranks


@pytest.mark.parametrize("partial", [True, False])
def test_tensor_parallel_ranks_send_parts_or_wholes(partial: bool) -> None:
    run_ranks(run_chain, 4, timeout=60, num_model_chunks=1, lengths=[4, 4], options={"partial": partial}, tensor=2)


EXPERTS = {
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 8,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
BALANCE = {"moe_aux_loss_lambda": 0.01, "moe_z_loss_lambda": 0.001, "moe_router_bias_update_rate": 0.001}
TWO, FOUR_BY_TWO = {"pipeline": 2}, {"pipeline": 4, "virtual_pipeline": 2}
LORA = {"rank": 2, "alpha": 4.0}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "tied embeddings": (2, {"degrees": TWO}),
    "own head": (2, {"degrees": TWO, "model": {"tie_word_embeddings": False}}),
    "tied over four stages": (4, {"degrees": {"pipeline": 4}}),
    "interleaved": (4, {"degrees": FOUR_BY_TWO, "model": {"num_hidden_layers": 8}, "accumulation": 8}),
    "a list of stages, adapters": (2, {"degrees": TWO, "method": [0, 1], "lora": LORA}),
    "experts, predictions ahead": (
        2,
        {
            "degrees": TWO,
            "model": {**EXPERTS, "num_nextn_predict_layers": 2},
            "build": {"balance": BALANCE},
            "recompute": "hooks",
        },
    ),
    "dropout and recomputation": (
        2,
        {
            "degrees": TWO,
            "options": {"fixed_shape": False},  # padding would change the draws
            "recompute": "PyLayer",
            "build": {"hidden_dropout": 0.2, "attention_dropout": 0.1},
        },
    ),
    "preferences, adapters aside": (2, {"degrees": TWO, "lora": LORA, "loss_type": "sigmoid"}),
    "preferences, a frozen copy": (2, {"degrees": TWO, "loss_type": "kto_pair"}),
    "too few micro-batches": (
        4,
        {"degrees": FOUR_BY_TWO, "model": {"num_hidden_layers": 8}, "accumulation": 3, "loss_type": "kto_pair"},
    ),
    "with data parallelism": (4, {"degrees": TWO}),
    "with tensor parallelism": (4, {"degrees": {**TWO, "tensor": 2}}),
    "with sequence parallelism": (4, {"degrees": {**TWO, "tensor": 2, "sequence_parallel": True}}),
}


@pytest.mark.parametrize("run", chosen(RUNS, PLAIN_RUNS))
def test_a_decoder_in_stages_trains_as_in_one_process(run: str) -> None:
    """Five AdamW steps with clipping: losses, figures and norms within 1e-5; gradients of the first step, too."""
    ranks, arguments = RUNS[run]
    found = run_ranks(check_decoder, ranks, timeout=100, world=ranks, **arguments)
    for worst in found:
        assert worst["figures"] < 1e-5 and worst["gradient"] < 1e-5 and worst["norm"] < 1e-4, worst
    assert sum(worst["names"] for worst in found) >= found[0]["all"]


def test_all_stages_blame_the_same_micro_batch() -> None:
    assert run_ranks(break_a_gradient, 2, timeout=60, number=2) == [[2], [2]]
