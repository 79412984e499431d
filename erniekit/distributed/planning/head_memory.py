"""Estimate the values that heads and their losses save and use, by what the head predicts. Needs no Paddle or NumPy.

Letters: T tokens of a micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.distributed.planning.code_memory import code_head_values
from erniekit.model.architectures.parts import LLM
from erniekit.model.vocabulary import new_row_shapes

if TYPE_CHECKING:
    from erniekit.distributed.planning.memory import Workload
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig

CHUNK_LOGITS = 4 << 20  # head.CHUNK_LOGITS; a test compares the two
# Arrays of a chunk's logits that exist at once where a student is compared with its teacher: the logits of both, their
# log-probabilities, the gradient, the labels as columns, and two between them (`model/distillation_head.py`).
CHUNKS_OF_A_DIVERGENCE = 8


def head_values(model: ModelConfig, work: Workload, topology: Topology, pp_stage: int) -> tuple[int, int]:
    """Return the values that the loss saves until backward has ended, and its temporary values."""
    if pp_stage < topology.pipeline - 1:
        return 0, 0
    if model.scored:
        return work.tokens, work.tokens  # at most every token has a score
    if model.architecture.codes is not None:
        return code_head_values(model, work, topology, CHUNK_LOGITS)
    vocabulary = model.vocab_size // topology.tensor
    head = vocabulary * model.hidden_size
    losses = 1 + model.num_nextn_predict_layers  # each keeps its values until backward begins
    if not work.fused_head:
        return losses * work.tokens * vocabulary, work.tokens * vocabulary  # probabilities; logits or their gradient
    # The gradients of hidden states, and of a trained head or its rows of new tokens, are computed with the loss.
    rows, width = next(iter(new_row_shapes(model).values()), (0, 0))
    trained = rows * width if work.adapters is not None else head if LLM not in work.frozen else 0
    saved = losses * (work.tokens * model.hidden_size + trained)
    chunk = min(max(CHUNK_LOGITS, head // 4), work.tokens * vocabulary)
    return saved, chunk * CHUNKS_OF_A_DIVERGENCE if work.distills else chunk
