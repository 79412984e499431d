"""What ranks send, against closed formulas of the papers for a dense model, and what must not be sent at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from erniekit.distributed.planning.communication import step_bytes
from erniekit.distributed.planning.memory import BFLOAT16_O2, Workload
from erniekit.distributed.stages import layer_chunks
from erniekit.distributed.topology import Topology
from erniekit.model.lora.config import LoraSettings
from tests.model.tiny import tiny_config

LAYERS, HIDDEN, TOKENS, MICRO_BATCHES = 4, 16, 64, 8
MODEL = tiny_config(num_hidden_layers=LAYERS, vocab_size=64, tie_word_embeddings=False)
EXPERTS = tiny_config(
    model_type="ernie4_5_moe", num_hidden_layers=LAYERS, vocab_size=64, moe_num_experts=4, moe_k=2,
    moe_intermediate_size=24, moe_num_shared_experts=0, moe_layer_start_index=0,
)  # fmt: skip
WORK = Workload(batch_size=2, max_seq_len=TOKENS // 2, accumulation=MICRO_BATCHES)
STATES = 4 * MICRO_BATCHES * TOKENS * HIDDEN  # bytes of all hidden states of a step


def test_one_process_sends_nothing() -> None:
    assert set(step_bytes(EXPERTS, WORK, Topology()).values()) == {0}


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallelism_sums_hidden_states_four_times_a_layer(degree: int) -> None:
    model = tiny_config(num_hidden_layers=LAYERS, vocab_size=64, num_key_value_heads=4)
    sent = step_bytes(model, WORK, Topology(tensor=degree))
    loss = 4 * 3 * MICRO_BATCHES * TOKENS
    expected = 2 * (degree - 1) / degree * ((4 * LAYERS + 2) * STATES + loss)
    assert sent["tensor"] == pytest.approx(expected)
    assert sum(sent.values()) == sent["tensor"]
    norms = (2 * LAYERS + 1) * HIDDEN * 4
    divided = step_bytes(model, WORK, Topology(tensor=degree, sequence_parallel=True))["tensor"]
    assert divided == pytest.approx(expected + 2 * (degree - 1) / degree * norms)
    again = step_bytes(model, replace(WORK, recompute=True), Topology(tensor=degree))["tensor"]
    assert again == pytest.approx(expected + 2 * (degree - 1) / degree * 2 * LAYERS * STATES)
    for part, blocks in (("full_attn", 1), ("core_attn", 0)):
        work = replace(WORK, recompute=True, recompute_granularity=part)
        again = step_bytes(model, work, Topology(tensor=degree))["tensor"]
        assert again == pytest.approx(expected + 2 * (degree - 1) / degree * blocks * LAYERS * STATES)


def test_experts_get_each_token_k_times_and_send_it_back() -> None:
    topology = Topology(tensor=2, sequence_parallel=True, expert_axis="tensor")
    sent = step_bytes(EXPERTS, WORK, topology)["experts"]
    own_tokens, elsewhere, ways, k = STATES / 2, 1 / 2, 4, 2  # there and back, in forward and in backward
    assert sent == pytest.approx(LAYERS * ways * k * own_tokens * elsewhere)
    along_data = Topology(data=2, expert_axis="data")
    assert step_bytes(EXPERTS, WORK, along_data)["experts"] == pytest.approx(2 * sent)
    dense = step_bytes(EXPERTS, WORK, Topology(data=2))["data"]
    assert step_bytes(EXPERTS, WORK, along_data)["data"] < 0.6 * dense  # of the experts nothing is summed


def test_stages_send_hidden_states_on_and_gradients_back() -> None:
    topology = Topology(pipeline=4)
    chunks = layer_chunks(LAYERS, topology)
    sent = [step_bytes(MODEL, WORK, topology, chunks, stage)["pipeline"] for stage in range(4)]
    assert sent == [STATES, 2 * STATES, 2 * STATES, STATES]
    tied = replace(MODEL, tie_word_embeddings=True)
    both = [step_bytes(tied, WORK, topology, chunks, stage)["pipeline"] for stage in range(4)]
    embedding = 4 * 64 * HIDDEN
    assert [more - less for more, less in zip(both, sent, strict=True)] == [embedding, 0, 0, embedding]
    interleaved = Topology(pipeline=4, virtual_pipeline=2)
    model = replace(MODEL, num_hidden_layers=8)
    first = step_bytes(model, WORK, interleaved, layer_chunks(8, interleaved), 0)["pipeline"]
    assert first == 3 * STATES


def test_only_trained_gradients_are_sent_as_often_as_they_are_kept() -> None:
    values = 4 * MODEL.parameter_count()
    assert step_bytes(MODEL, WORK, Topology(data=4))["data"] == pytest.approx(2 * 3 / 4 * values)
    levels = [step_bytes(MODEL, replace(WORK, sharding=level), Topology(sharding=4))["sharding"] for level in (1, 2, 3)]
    assert levels[0] == pytest.approx(3 / 4 * 2 * values)
    assert levels[1] == pytest.approx(3 / 4 * (MICRO_BATCHES + 1) * values)  # nobody keeps gradients for the step's end
    assert levels[2] == pytest.approx(3 / 4 * (2 * MICRO_BATCHES + MICRO_BATCHES) * values)
    lora = replace(WORK, adapters=LoraSettings(rank=2, alpha=4.0))
    assert step_bytes(MODEL, lora, Topology(data=4))["data"] < 0.3 * 2 * 3 / 4 * values


def test_sixteen_bit_activations_are_half_as_many_bytes() -> None:
    topology = Topology(tensor=2)
    whole, half = (
        step_bytes(MODEL, replace(WORK, formats=formats), topology)["tensor"]
        for formats in (WORK.formats, replace(BFLOAT16_O2, gradients=4))
    )
    assert half == pytest.approx(whole / 2, rel=0.02)  # but for the loss


def test_experts_of_ranks_that_have_all_tokens_add_up_their_results() -> None:
    topology = Topology(tensor=2, expert_axis="tensor")
    passes, all_reduce = 2, 2 * 1 / 2
    assert step_bytes(EXPERTS, WORK, topology)["experts"] == pytest.approx(LAYERS * passes * all_reduce * STATES)
