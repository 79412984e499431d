"""What tables and heads of codes take beside the decoder, counted by hand."""

from __future__ import annotations

from erniekit.distributed.planning.code_memory import code_head_values, code_states
from erniekit.distributed.planning.head_memory import CHUNK_LOGITS
from erniekit.distributed.planning.memory import Workload, training_memory
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.parts import LLM
from tests.model.tiny import tiny_config
from tests.model.tiny_speech import omnivoice_config, vall_e_config

MASKED, LEVELS = omnivoice_config(), vall_e_config()  # H 16; 4 heads of 17; heads of 17, 16, 16, 16 and 56 tokens
PLAIN = Workload(batch_size=2, max_seq_len=100)
FUSED = Workload(batch_size=2, max_seq_len=100, fused_head=True)


def test_all_levels_keep_their_logits_or_one_does():
    assert code_head_values(MASKED, PLAIN, Topology(), CHUNK_LOGITS) == (200 * 4 * 17, 200 * 17)
    assert code_head_values(LEVELS, PLAIN, Topology(), CHUNK_LOGITS) == (200 * 17, 200 * 17)


def test_fused_heads_keep_gradients_of_states_and_of_the_trained_heads():
    assert code_head_values(MASKED, FUSED, Topology(), CHUNK_LOGITS) == (200 * 4 * 16 + 68 * 16, 200 * 17)
    assert code_head_values(LEVELS, FUSED, Topology(), CHUNK_LOGITS) == (200 * 16 + 121 * 16, 200 * 17)
    frozen = Workload(batch_size=2, max_seq_len=100, fused_head=True, frozen=frozenset({LLM}))
    assert code_head_values(MASKED, frozen, Topology(), CHUNK_LOGITS)[0] == 200 * 4 * 16


def test_ranks_have_their_positions_with_sequence_parallelism_and_all_without():
    whole, alone = Topology(tensor=2), Topology()
    divided = Topology(tensor=2, sequence_parallel=True)
    for of in (code_head_values(MASKED, PLAIN, each, CHUNK_LOGITS)[0] for each in (whole, alone)):
        assert of == 2 * code_head_values(MASKED, PLAIN, divided, CHUNK_LOGITS)[0]


def test_rows_of_all_levels_stand_at_each_position():
    assert code_states(MASKED, PLAIN, Topology()) == (200 * 4 + 3 * 68) * 16
    assert code_states(tiny_config(), PLAIN, Topology()) == 0


def test_the_estimate_of_a_run_has_them():
    first, last = (training_memory(MASKED, PLAIN, Topology(pipeline=2), pp_stage=stage) for stage in range(2))
    assert first["logits"] == 0 and last["logits"] == 4 * 200 * 68
    assert first["parameters"] > last["parameters"]  # embedding and tables, beside norm and heads
