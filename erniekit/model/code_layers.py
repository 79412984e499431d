"""What a model that writes codes has beside its decoder: tables whose rows stand for codes, and a head for each level.

Families: `architectures/speaking.py`. Shapes: B batch, S positions, T = B S, C columns of codes at a position, H hidden
size, L levels, V_l the logits of level l, R the rows of all tables. Tables and heads are small, so every
tensor-parallel rank has all of them, and no size of a codebook has to be divisible by anything.

Ranks that divide parameters (ZeRO 3) have a weight only inside of the `forward` of the layer that owns it, so whatever
uses one is computed in there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from erniekit.model import bf16
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout
from erniekit.model.decoder import Decoder, VocabularyRows
from erniekit.model.head import IGNORE_INDEX, TokenLoss, loss_of_logits, loss_of_rows
from erniekit.model.linear import ZEROS
from erniekit.model.new_rows import NewRows, grown_logits
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class CodeTable(nn.Layer):
    """A table of hidden states [rows, H] of codes."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([rows, hidden_size], default_initializer=ZEROS)

    def forward(self, codes_BSC: Tensor) -> Tensor:
        """Return a copy of the rows [rows, H], whatever the codes."""
        return paddle.assign(self.weight)


class CodeTables(nn.Layer):
    """The tables of several levels, of these sizes, one after the other."""

    def __init__(self, sizes: list[int], hidden_size: int) -> None:
        super().__init__()
        self.embeddings = nn.LayerList(CodeTable(rows, hidden_size) for rows in sizes)

    def forward(self, codes_BSC: Tensor) -> Tensor:
        """Return a copy of the rows [rows, H] of all of them."""
        return paddle.concat([table(codes_BSC) for table in self.embeddings])


def embed_codes(decoder: Decoder, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the hidden states [B, S, H] that enter the first layer: where a position has codes the sum of their rows,
    elsewhere the embedding of its token. With sequence parallelism those of the rank's own positions, [1, T / n, H].

    Args:
        inputs: `input_ids` int64 [B, S], in which numbers behind the vocabulary are codes of level 0 that the model
            has written itself, and `codes` int64 [B, S, C], row numbers or -1, of batches that have any.
    """
    config, tp = decoder.config, decoder.tp
    text, layout = config.architecture.text, code_layout(config)
    assert text is not None
    ids_BS, codes_BSC = inputs["input_ids"], inputs.get("codes")
    if layout.written is not None:
        ids_BS, codes_BSC = _without_written(ids_BS, codes_BSC, config.vocab_size, layout.written)
    embeddings = text.embed(decoder, {"input_ids": ids_BS})
    if codes_BSC is None:
        return embeddings
    tables = [tower(codes_BSC) for tower in decoder.towers]
    rows_RH = tables[0] if len(tables) == 1 else paddle.concat(tables)
    if tp.sequence_parallel_active:  # each rank's positions give a part of the gradient
        rows_RH = replace(tp, sequence_parallel=False).copy_to_tp(rows_RH)
        codes_BSC = paddle.stack([tp.local_tokens(column) for column in codes_BSC.unbind(2)], -1)
    states = _sum_of_rows(rows_RH, codes_BSC)
    multiplier = config.architecture.multipliers(config).embedding
    states = states if multiplier == 1.0 else states * multiplier
    has_codes = (codes_BSC >= 0).any(-1, keepdim=True)
    return paddle.where(has_codes, states.astype(embeddings.dtype), embeddings)


def _without_written(
    ids_BS: Tensor, codes_BSC: Tensor | None, vocabulary: int, first_row: int
) -> tuple[Tensor, Tensor]:
    """Return ids that are all tokens, and codes with those that stood among the ids in their first column."""
    is_written = ids_BS >= vocabulary
    first = paddle.full_like(ids_BS, -1) if codes_BSC is None else codes_BSC[:, :, 0]
    first = paddle.where(is_written, ids_BS - vocabulary + first_row, first).unsqueeze(-1)
    codes = first if codes_BSC is None else paddle.concat([first, codes_BSC[:, :, 1:]], -1)
    return paddle.where(is_written, paddle.zeros_like(ids_BS), ids_BS), codes


def _sum_of_rows(rows_RH: Tensor, codes_BSC: Tensor) -> Tensor:
    """Return the sums [B, S, H] over C of the rows with these numbers; -1 adds nothing."""
    count, size = rows_RH.shape
    with_none = paddle.concat([rows_RH, paddle.zeros([1, size], rows_RH.dtype)])
    numbers = paddle.where(codes_BSC >= 0, codes_BSC, paddle.full_like(codes_BSC, count))
    return F.embedding(numbers, with_none).sum(-2)


class Projection(NamedTuple):
    """What makes logits of hidden states: W [V, H], perhaps a bias [V], and rows that stand for some of W's."""

    weight: Tensor
    bias: Tensor | None = None
    new_rows: NewRows | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return hidden W^T + bias; [..., H] -> [..., V]."""
        if self.new_rows is not None:
            return grown_logits(hidden, self.weight, self.new_rows)
        if bf16.computes(bf16.HEAD, hidden, self.weight):
            logits = bf16.linear(hidden, self.weight, transpose_weight=True)
        else:
            logits = paddle.matmul(hidden, self.weight, transpose_y=True)
        return logits if self.bias is None else logits + self.bias


# What is made of hidden states and the projection of a level, with the number of the level; a tuple of tensors.
Use = Callable[[Tensor, Projection, int], tuple[Tensor, ...]]


class JoinedHeads(nn.Layer):
    """The heads of `omnivoice`, in the place of `Head`: one matrix [L V, H], a level's rows after another's."""

    def __init__(self, config: ModelConfig, tied_to: Any, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        assert tied_to is None, "codes have rows of their own"
        self.tp, self.parallel_output = tp, True  # as of `Head`; no logits are divided
        self.sizes = [logits for _, logits in code_layout(config).heads]
        self.weight = self.create_parameter([sum(self.sizes), config.hidden_size], default_initializer=ZEROS)

    def forward(self, hidden: Tensor, compute: Callable[[Tensor], Any] | None = None) -> Any:
        """Return the logits [..., L V] of all levels, or what `compute` makes of `hidden`."""
        return Projection(self.weight).logits(hidden) if compute is None else compute(hidden)

    def use(self, hidden: Tensor, levels: range, use: Use) -> tuple[Tensor, ...]:
        """Return what `use` makes of these levels, one after the other."""
        results = self(hidden, partial(self._use, levels=levels, use=use))
        return _tensors(results)

    def _use(self, hidden: Tensor, levels: range, use: Use) -> tuple[Tensor, ...]:
        # cut once, so that the whole matrix gets its gradient once
        weights = paddle.split(self.weight, self.sizes) if len(self.sizes) > 1 else [self.weight]
        return tuple(each for level in levels for each in use(hidden, Projection(weights[level]), level))


class LevelHead(nn.Layer):
    """W [V_l, H], perhaps with a bias, of one level or of text."""

    def __init__(self, logits: int, hidden_size: int, *, bias: bool, vocabulary: VocabularyRows | None) -> None:
        super().__init__()
        self.weight = self.create_parameter([logits, hidden_size], default_initializer=ZEROS)
        self.bias = self.create_parameter([logits], default_initializer=ZEROS, is_bias=True) if bias else None
        self.vocabulary = vocabulary  # of text

    def forward(self, hidden: Tensor, level: int, use: Use) -> tuple[Tensor, ...]:
        """Return what `use` makes of this projection."""
        new_rows = None if self.vocabulary is None else self.vocabulary.place(self)
        return use(hidden, Projection(self.weight, self.bias, new_rows), level)


class LevelHeads(nn.Layer):
    """The heads of `vall_e`, in the place of `Head`: one for each level, level 0 with a stop, and one for text."""

    def __init__(self, config: ModelConfig, tied_to: Any, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        assert tied_to is None, "codes have rows of their own"
        self.tp, self.parallel_output = tp, True  # as of `Head`; no logits are divided
        layout, self._vocabulary_size = code_layout(config), config.vocab_size
        rows = VocabularyRows(config.vocabulary, NO_TENSOR_PARALLEL)
        self.proj = nn.LayerList(
            LevelHead(
                logits,
                config.hidden_size,
                bias=layout.bias and number < layout.levels,
                vocabulary=rows if number == layout.levels else None,
            )
            for number, (_, logits) in enumerate(layout.heads)
        )

    @property
    def text(self) -> LevelHead:
        """The projection with a row for each token."""
        return self.proj[-1]

    def forward(self, hidden: Tensor, compute: Callable[[Tensor], Any] | None = None) -> Any:
        """Return what `compute` makes of `hidden`; without it logits [..., vocabulary + V + 1], in which level 0 stands
        behind tokens that are impossible: so codes are decoded as tokens are."""
        if compute is not None:
            return compute(hidden)
        logits = logits_of_level(self, hidden, 0)
        impossible = paddle.full([*logits.shape[:-1], self._vocabulary_size], -float("inf"), logits.dtype)
        return paddle.concat([impossible, logits], -1)

    def use(self, hidden: Tensor, levels: range, use: Use) -> tuple[Tensor, ...]:
        """Return what `use` makes of these levels, one after the other; text is the one behind the last level."""
        return tuple(self(hidden, partial(self._use, levels=levels, use=use)))

    def _use(self, hidden: Tensor, levels: range, use: Use) -> tuple[Tensor, ...]:
        return tuple(each for level in levels for each in _tensors(self.proj[level](hidden, level, use)))


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def level_losses(
    decoder: Decoder, hidden_BSH: Tensor, labels_BSC: np.ndarray, *, fused: bool = False
) -> list[TokenLoss]:
    """Sum -log softmax(hidden W_l^T + bias_l)[label] for each head l over the positions that have a label of it.

    Of a head without labels the loss is 0 and depends on all weights, so that ranks that communicate during backward
    compute all gradients. Each tensor-parallel rank computes the same, or with sequence parallelism its own positions.

    Args:
        hidden_BSH: the last hidden states, after the final norm, as of `head.token_loss`.
        labels_BSC: int64, what head l predicts at a position, [:, :, l], or -100: the code of level l, and in a last
            column behind the levels the token of a text (`vall_e`).
        fused: compute head, loss and gradient chunk by chunk, so that the full logits never exist.
    """
    tp, needs_gradient = decoder.tp, paddle.is_grad_enabled()
    hidden_TH = hidden_BSH.reshape([-1, hidden_BSH.shape[-1]])
    labels_TC = labels_BSC.reshape(-1, labels_BSC.shape[-1])
    counts = (labels_TC != IGNORE_INDEX).sum(0).tolist()
    if tp.sequence_parallel_active:
        labels_TC = labels_TC[tp.rank * hidden_TH.shape[0] : (tp.rank + 1) * hidden_TH.shape[0]]

    def use(states_TH: Tensor, projection: Projection, level: int) -> tuple[Tensor, ...]:
        return _summed_loss(states_TH, projection, labels_TC[:, level], fused, needs_gradient)

    results = decoder.head.use(hidden_TH, range(len(counts)), use)
    losses = []
    for count, loss_sum, correct_count in zip(counts, results[::2], results[1::2], strict=True):
        if tp.sequence_parallel_active:
            all_tokens = replace(tp, sequence_parallel=False)
            loss_sum = all_tokens.reduce_from_tp(loss_sum.reshape([1])).reshape([])
            correct_count = tp.sum(correct_count.reshape([1])).reshape([])
        losses.append(TokenLoss(loss_sum, paddle.to_tensor(count, "int64"), correct_count))
    return losses


def code_logits(decoder: Decoder, hidden_NH: Tensor, level: int) -> Tensor:
    """Return the logits [N, V_l] of a level; behind the last level of `vall_e` those [N, vocabulary] of text."""
    return logits_of_level(decoder.head, hidden_NH, level)


def logits_of_levels(decoder: Decoder, hidden_NH: Tensor) -> Tensor:
    """Return the logits [N, C, V] of all levels of `omnivoice`, by one product."""
    heads = decoder.head
    assert isinstance(heads, JoinedHeads) and len(set(heads.sizes)) == 1, "levels of one size"
    return heads(hidden_NH).reshape([hidden_NH.shape[0], len(heads.sizes), heads.sizes[0]])


def logits_of_level(heads: JoinedHeads | LevelHeads, hidden: Tensor, level: int) -> Tensor:
    """Return the logits [..., V_l] of a level."""

    def use(states: Tensor, projection: Projection, _: int) -> tuple[Tensor, ...]:
        return (projection.logits(states),)

    (logits,) = heads.use(hidden, range(level, level + 1), use)
    return logits


def _summed_loss(
    states_TH: Tensor, projection: Projection, labels_T: np.ndarray, fused: bool, needs_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the rows that have a label, and how many of these have the largest logit.

    The operators are the same whatever rows have one, because ranks with other rows exchange gradients during backward
    in the order of these.
    """
    positions = np.flatnonzero(labels_T != IGNORE_INDEX)
    count = len(positions)
    if not count:
        positions = np.zeros(1, np.int64)  # a row that counts for nothing
    labels = paddle.to_tensor(np.maximum(labels_T[positions], 0))
    states_TH = paddle.gather(states_TH, paddle.to_tensor(positions))
    if fused:
        weight = projection.weight
        if projection.bias is not None:  # a further channel, which is 1
            weight = paddle.concat([weight, projection.bias.unsqueeze(1)], 1)
            states_TH = paddle.concat([states_TH, paddle.ones([len(positions), 1], states_TH.dtype)], 1)
        found = loss_of_rows(states_TH, weight, labels, NO_TENSOR_PARALLEL, projection.new_rows, needs_gradient)
    else:
        found = loss_of_logits(projection.logits(states_TH), labels, NO_TENSOR_PARALLEL)
    loss_sum, correct_count = found
    return loss_sum * float(count > 0), correct_count * int(count > 0)
