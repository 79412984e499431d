"""Estimate the values that tables and heads of codes save and use (`model/code_layers.py`). Needs no Paddle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.parts import LLM
from erniekit.model.architectures.speaking import code_layout

if TYPE_CHECKING:
    from erniekit.distributed.planning.memory import Workload
    from erniekit.distributed.topology import Topology
    from erniekit.model.architectures.model_config import ModelConfig


def code_head_values(model: ModelConfig, work: Workload, topology: Topology, chunk_logits: int) -> tuple[int, int]:
    """Return the values that the losses of all levels save until backward has ended, and their temporary values.

    At most every token is predicted at all levels, or at one where levels are written apart.

    Args:
        chunk_logits: of a chunk of the fused head, numbers.
    """
    layout = code_layout(model)
    levels = [logits for _, logits in layout.heads[: layout.levels]]
    own_tokens = work.tokens // (topology.tensor if topology.sequence_parallel else 1)
    predicted = sum(levels) if layout.mask_id is not None else max(levels)
    if not work.fused_head:
        return own_tokens * predicted, own_tokens * max(levels)
    head = sum(rows * model.hidden_size for _, rows in layout.heads)
    trained = 0 if work.adapters is not None or LLM in work.frozen else head
    states = own_tokens * (layout.levels if layout.mask_id is not None else 1) * model.hidden_size
    return states + trained, min(max(chunk_logits, head // 4), own_tokens * max(levels))


def code_states(model: ModelConfig, work: Workload, topology: Topology) -> int:
    """Return the temporary values of tables of codes: the rows of all levels at each position, and copies of the tables
    with their gradient."""
    if model.architecture.codes is None:
        return 0
    layout = code_layout(model)
    own_tokens = work.tokens // (topology.tensor if topology.sequence_parallel else 1)
    return (own_tokens * layout.levels + 3 * layout.rows) * model.hidden_size
