"""One step of decoding with an exported program, which reads the keys and values so far and returns new ones."""

from __future__ import annotations

import numpy as np

from erniekit.export.saved_program import SavedProgram
from erniekit.inference.decoding.step import BLOCK_TOKENS, StepBatch


class ProgramStep:
    """Computes steps with a program. Keys and values are in blocks between two steps, and side by side within one."""

    def __init__(self, program: SavedProgram) -> None:
        self._program = program
        of = program.config
        self._shape = (of.num_key_value_heads, BLOCK_TOKENS, of.head_dim)
        self._blocks = [np.zeros((0, *self._shape), np.float32) for _ in range(2 * of.num_hidden_layers)]

    def logits(self, batch: StepBatch) -> np.ndarray:
        """See `Step`. Sequences are padded to the longest, which a program cannot do without."""
        self._grow(int(batch.block_tables.max()) + 1)
        counts = np.diff(batch.starts).astype(np.int64)
        past, new = int(batch.cached.max()), int(counts.max())
        places = np.arange(new)
        is_token = places < counts[:, None]
        ids, positions = np.zeros((2, len(counts), new), np.int64)
        ids[is_token], positions[is_token] = batch.token_ids, batch.positions
        seen = np.concatenate([np.arange(past) < batch.cached[:, None], is_token], axis=1).astype(np.int64)
        logits, *both = self._program.step([ids, positions, seen, counts - 1, *self._past(batch, past)])
        sequence = np.repeat(np.arange(len(counts)), counts)
        blocks = batch.block_tables[sequence, batch.positions // BLOCK_TOKENS]
        of_tokens = np.broadcast_to(places, is_token.shape)[is_token] + past
        for stored, present in zip(self._blocks, both, strict=True):
            stored[blocks, :, batch.positions % BLOCK_TOKENS] = present[sequence, :, of_tokens]
        wanted = np.searchsorted(batch.starts, batch.wanted, side="right") - 1
        assert (batch.wanted == batch.starts[1:][wanted] - 1).all(), "a program computes logits of last tokens"
        return logits[wanted]

    def _past(self, batch: StepBatch, length: int) -> list[np.ndarray]:
        """Return keys and values of every layer, float32 [N, K, length, D]; zero where a sequence has fewer: what is
        masked must be finite."""
        heads, _, size = self._shape
        is_own = (np.arange(length) < batch.cached[:, None])[:, None, :, None]
        tables = np.maximum(batch.block_tables[:, : -(-length // BLOCK_TOKENS)], 0)
        shape = (len(tables), heads, tables.shape[1] * BLOCK_TOKENS, size)
        return [
            np.ascontiguousarray(
                np.where(is_own, stored[tables].transpose(0, 2, 1, 3, 4).reshape(shape)[:, :, :length], np.float32(0))
            )
            for stored in self._blocks
        ]

    def _grow(self, count: int) -> None:
        held = len(self._blocks[0])
        if count > held:
            more = np.zeros((max(count, 2 * held) - held, *self._shape), np.float32)
            self._blocks = [np.concatenate([stored, more]) for stored in self._blocks]
