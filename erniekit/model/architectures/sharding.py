"""How every weight lies on the ranks of a layout, by its name. Needs no Paddle.

The one table that loading, saving, the sums of gradients and their norm read.

Names are Hugging Face's, those of adapters `<path of the linear>.lora_A` and so on; axes are those of the decoder's
layout (linear weights [in, out], embeddings and heads [vocabulary, H]).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COLUMN_PARALLEL = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}  # linears whose outputs are divided
ROW_PARALLEL = {"o_proj", "down_proj"}  # linears whose inputs are divided
VOCAB_PARALLEL = {"model.embed_tokens.weight", "lm_head.weight"}
_LINEAR = re.compile(
    r"(?P<path>.*\.(?P<linear>\w+_proj(?:\.\d+)?))\.(?P<kind>weight|bias|lora_A|lora_B|lora_magnitude_vector)"
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Axis that is cut, by the kind of parameter. What is not cut, and stands beside a cut: see `Placement.partial`.
_COLUMN_AXES = {"weight": 1, "bias": 0, "lora_B": 1, "lora_magnitude_vector": 0}
_ROW_AXES = {"weight": 0, "lora_A": 0}


@dataclass(frozen=True)
class Placement:
    """Where the values of one weight are.

    Attributes:
        axis: the axis that is divided over the tensor-parallel group; None: every rank of it has all values.
        partial: with the whole of it on every rank, whether each rank's gradient is a part of the sum.
        expert: its number among the routed experts of its layer; None: it belongs to no routed expert.
    """

    axis: int | None = None
    partial: bool = False
    expert: int | None = None


def placement(name: str, *, sequence_parallel: bool = False) -> Placement:
    """Where a weight lies when the tensor-parallel group has several ranks.

    Args:
        sequence_parallel: whether hidden states are divided along the sequence outside of blocks, so that what works
        on them
            there (norms, routers, biases after a sum, experts) sees a part of the tokens on each rank.
    """
    expert = _EXPERT.search(name)
    if expert:  # experts are divided as wholes
        return Placement(partial=sequence_parallel, expert=int(expert.group(1)))
    if name in VOCAB_PARALLEL:
        return Placement(axis=0)
    match = _LINEAR.fullmatch(name)
    linear, kind = (match["linear"], match["kind"]) if match else ("", "")
    if linear in COLUMN_PARALLEL:
        axis = _COLUMN_AXES.get(kind)
        return Placement(axis=axis, partial=axis is None)  # A: every rank's slice of B gives a part of its gradient
    if linear in ROW_PARALLEL:
        axis = _ROW_AXES.get(kind)
        return Placement(axis=axis, partial=axis is None and (kind.startswith("lora_") or sequence_parallel))
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return Placement(partial=True)  # each rank normalises its own heads
    return Placement(partial=sequence_parallel)
