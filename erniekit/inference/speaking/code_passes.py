"""Forward passes over packed documents of text and codes, which are computed again as their codes change.

Documents lie end to end in one row without padding; none sees another. C levels, S positions of the row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import paddle

from erniekit.data.collate import collate
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.errors import UserError
from erniekit.model.attention import AttentionPlan
from erniekit.model.bf16 import float32_products
from erniekit.model.code_layers import code_logits, logits_of_levels

MAX_POSITIONS = 8192  # of a row, unless one document is longer


class CodeDocument(NamedTuple):
    """Text and codes as the decoder reads them.

    Attributes:
        ids: int64 [n], token ids; those of positions with codes do not count.
        codes: int64 [n, C], rows of the code tables; -1 for none.
        causal: whether a position sees only those up to itself.
        positions: int64 [n], for the rotation; None: from 0.
    """

    ids: np.ndarray
    codes: np.ndarray
    causal: bool = False
    positions: np.ndarray | None = None


class CodePass:
    """Some documents in one row.

    Attributes:
        codes: int64 [S, C]; write into it to change what the next pass reads.
        starts: where each document begins, and the end of the last.
    """

    def __init__(self, decoder: Any, documents: Sequence[CodeDocument]) -> None:
        self._decoder = decoder
        samples = [_sample(document) for document in documents]
        batch = collate([samples], [range(len(samples))], pad_id=0, arrays=("codes",), both_ways=True)
        self._ids, self._positions = paddle.to_tensor(batch.input_ids), paddle.to_tensor(batch.position_ids)
        self._plan = AttentionPlan.build(batch.startend_row_indices, causal=False)
        self.codes: np.ndarray = batch.arrays["codes"][0]
        self.starts = np.cumsum([0, *(len(document.ids) for document in documents)])

    def hidden(self) -> paddle.Tensor:
        """Return the hidden states [S, H] after the final norm."""
        codes = paddle.to_tensor(self.codes[None])
        with generating(self._decoder):
            return self._decoder(self._ids, self._positions, self._plan, codes=codes)[0]

    def logits(self, hidden_SH: paddle.Tensor, places: slice, level: int) -> paddle.Tensor:
        """Return float32 logits [n, V] of the codes of a level at some positions."""
        with generating(self._decoder):
            return code_logits(self._decoder, hidden_SH[places], level).astype("float32")

    def logits_of_levels(self, hidden_SH: paddle.Tensor, places: slice) -> paddle.Tensor:
        """Return float32 logits [n, C, V] of the codes of all levels at some positions; only of masked codes."""
        with generating(self._decoder):
            return logits_of_levels(self._decoder, hidden_SH[places]).astype("float32")


def _sample(document: CodeDocument) -> Sample:
    arrays = {"codes": document.codes}
    if document.positions is not None:
        arrays["position_ids"] = document.positions
    labels = np.full(len(document.ids), IGNORE_INDEX, np.int32)
    return Sample(document.ids.astype(np.int32), labels, arrays=arrays, causal=document.causal)


@contextmanager
def generating(decoder: Any) -> Iterator[None]:
    """Compute without gradients and dropout, with all tokens on each rank; the decoder's mode stays as it is."""
    training = decoder.training
    if training:
        decoder.eval()
    try:
        with paddle.no_grad(), decoder.tp.no_sequence_parallel(), float32_products():
            yield
    finally:
        if training:
            decoder.train()


def grouped(lengths: Sequence[int], limit: int | None = None) -> Iterator[list[int]]:
    """Yield the indices of documents that share a row, in order: as many as fit, at least one.

    Args:
        limit: the positions of a row; None: MAX_POSITIONS.
    """
    limit = MAX_POSITIONS if limit is None else limit
    group: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if group and total + length > limit:
            yield group
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield group


def refuse_not_finite(values: np.ndarray, number: int) -> None:
    """Raise UserError if the model has no next code for a text; `number` counts from 1 and is for the message."""
    if not np.isfinite(values).all():
        raise UserError(
            f"the model cannot speak text {number}: its logits are not finite. Its numbers overflow, as after a "
            "training that diverged, or in float16; take an earlier checkpoint, or a model in bfloat16 or float32"
        )
