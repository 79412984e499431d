"""One step of decoding, as the scheduler asks it of a model: some tokens of several sequences in, logits out.

Three kinds of steps compute the same: `decoder_step.py` with the model's own layers, for every family and device,
`native_step.py` in one call of our C library, for plain decoders on a CPU, and `program_step.py` with an exported
program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

BLOCK_TOKENS = 16  # tokens of one key-value block


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one step, sequence after sequence: a chunk of a prompt, or the newest token of an answer.

    Shapes: N sequences, T tokens of all of them, M tokens whose logits are wanted.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], of each token in its sequence.
        starts: int32 [N + 1]; the tokens of sequence n are starts[n] to starts[n + 1].
        cached: int32 [N], how many tokens of each sequence are in the cache before this step.
        block_tables: int32 [N, longest]; the blocks of each sequence in the order of its tokens, then -1. Token i of a
            sequence is in place i % BLOCK_TOKENS of its block i // BLOCK_TOKENS.
        wanted: int64 [M], indices among the T tokens.
        inputs: further arrays that the model's `embed` reads, such as features of recordings; only where N is 1.
        rotary: int64 [T], the positions by which tokens are turned, where these are not `positions`; None: they are.
        adapters: the name of the set of adapters with which the tokens are computed.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    cached: np.ndarray
    block_tables: np.ndarray
    wanted: np.ndarray
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    rotary: np.ndarray | None = None
    adapters: str = ""


class Step(Protocol):
    """Computes steps, and holds the keys and values of a number of blocks.

    That number is an upper bound: the scheduler gives out the lowest free blocks first, so that a step may take memory
    as block numbers grow. A block that is given out again holds the keys of a request that has ended, never read before
    they are written.
    """

    def logits(self, batch: StepBatch) -> np.ndarray:
        """Write keys and values of the batch's tokens into their blocks; return float32 logits [M, V].

        M may be 0, where all tokens are of prompts that go on in the next step. The tokens of a sequence are the next
        ones after those in the cache: positions[starts[n]] is cached[n].
        """
        ...
