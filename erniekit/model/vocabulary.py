"""Grow the vocabulary of a model: which rows of its embedding and head are new, and what they begin with.

A grown model has more rows than its files hold, or other values in rows that no token had. Its `ModelConfig` says so
(`ModelConfig.vocabulary`); everything that reads the files of a model then sees the grown matrices
(`storage/grown_weights.py`), and adapters train the new rows beside them (`lora/new_rows.py`).

Needs neither Paddle nor, before values are asked for, NumPy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from erniekit.model.architectures.plain_decoder import EMBEDDING, HEAD

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.architectures.model_config import ModelConfig

NORMAL, MEAN = "normal", "mean"
SIZE_MULTIPLE = 64  # of rows, if there have to be more of them, so that the usual tensor-parallel degrees divide them
NEW_ROWS = "new_rows"  # the parameter beside a frozen embedding or head


@dataclass(frozen=True)
class GrownVocabulary:
    """The new rows of a model's embedding and head.

    Attributes:
        first: the id of the first new token: the largest id of the tokenizer as it was, plus 1.
        count: the number of new tokens; their ids are consecutive.
        old_size: the rows that the files of the model hold; those in the places of new tokens had no token before.
        size: the rows of the grown model (`grown_size`).
        init: "normal": N(0, initializer_range), drawn from `seed` and the name of the weight; "mean": the mean of the
            rows below `first`. Rows that no token has, up to `size`, are the mean in either case, so that they are the
            same in every program that grows the model, and never likely.
        seed: of the draws.
        trained: whether new rows are trained beside adapters; a run that trains all weights trains them anyway.
    """

    first: int
    count: int
    old_size: int
    size: int
    init: str = NORMAL
    seed: int = 0
    trained: bool = True

    @property
    def ids(self) -> range:
        """The ids of the new tokens."""
        return range(self.first, self.first + self.count)

    @property
    def kept_until(self) -> int:
        """The rows that are either those of the file or those of new tokens; padding follows."""
        return max(self.old_size, self.first + self.count)

    def __str__(self) -> str:
        """For one line of a log."""
        rows = f"{self.old_size:,} rows" + (f" -> {self.size:,}" if self.size > self.old_size else "")
        tokens = f"{self.count:,} new token{'s' if self.count > 1 else ''}"
        return f"{tokens}, ids {self.first} to {self.first + self.count - 1}, {rows}, new rows {self.init}"


def grown_size(old_size: int, tokens: int) -> int:
    """Return the rows of a model for so many ids: as many as before, or the next multiple of 64 that suffices."""
    return old_size if tokens <= old_size else -(-tokens // SIZE_MULTIPLE) * SIZE_MULTIPLE


def grown_vocabulary(
    config: ModelConfig,
    first: int,
    count: int,
    *,
    init: str = NORMAL,
    seed: int = 0,
    trained: bool = True,
) -> GrownVocabulary:
    """Return the new rows of a model, whose configuration is that of its files, for tokens with these ids."""
    size = grown_size(config.vocab_size, first + count)
    return GrownVocabulary(first, count, config.vocab_size, size, init, seed, trained)


def grow(config: ModelConfig, vocabulary: GrownVocabulary | None) -> ModelConfig:
    """Return the configuration of the grown model, which reads the files of the old one; without growth itself."""
    return config if vocabulary is None else replace(config, vocab_size=vocabulary.size, vocabulary=vocabulary)


def as_stored(config: ModelConfig) -> ModelConfig:
    """Return the configuration that the files of a model have, before it is grown."""
    vocabulary = config.vocabulary
    return config if vocabulary is None else replace(config, vocab_size=vocabulary.old_size, vocabulary=None)


def already_grown(config: ModelConfig) -> ModelConfig:
    """Return the configuration with which files of a grown model are read: they hold all of its rows."""
    return replace(config, vocabulary=None)


def vocabulary_weights(config: ModelConfig) -> tuple[str, ...]:
    """Return the Hugging Face names of the weights that have a row for each token: the embedding and an untied head.

    A model that writes codes has no such head, or one of text behind those of its levels.
    """
    architecture = config.architecture
    embedding = architecture.file_name(EMBEDDING)
    if architecture.codes is not None:
        layout = architecture.codes(config)
        return (embedding, *(name for name, _ in layout.heads[layout.levels :]))
    return (embedding,) if config.ties_head else (embedding, architecture.file_name(HEAD))


def new_row_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of the new rows beside adapters, by the weight that they belong to; none without growth."""
    if config.vocabulary is None:
        return {}
    return {name: name.removesuffix("weight") + NEW_ROWS for name in vocabulary_weights(config)}


def new_row_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the new rows that are trained beside adapters; none if they are frozen."""
    vocabulary = config.vocabulary
    if vocabulary is None or not vocabulary.trained:
        return {}
    return dict.fromkeys(new_row_names(config).values(), (vocabulary.count, config.hidden_size))


class GrownParts(NamedTuple):
    """The rows of a grown weight that its file does not give, float32.

    Attributes:
        new: those of the new tokens, [count, H].
        padding: those of no token behind the rows of the file, up to `size`.
    """

    new: np.ndarray
    padding: np.ndarray


def grown_parts(vocabulary: GrownVocabulary, name: str, mean: np.ndarray, deviation: float) -> GrownParts:
    """Return the rows that a weight gets.

    Args:
        name: Hugging Face name of the weight; a stored copy of tied embeddings counts as the embeddings.
        mean: of the rows below `first`, [H].
        deviation: `initializer_range`.
    """
    import numpy as np

    row = mean.astype(np.float32)
    padding = np.tile(row, (vocabulary.size - vocabulary.kept_until, 1))
    if vocabulary.init == MEAN:
        return GrownParts(np.tile(row, (vocabulary.count, 1)), padding)
    digest = hashlib.sha256(f"{name} {NEW_ROWS}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64([vocabulary.seed, int.from_bytes(digest[:8], "little")]))
    drawn = generator.standard_normal((vocabulary.count, len(row)), np.float32)
    return GrownParts(np.multiply(drawn, np.float32(deviation), out=drawn), padding)


def grown_values(vocabulary: GrownVocabulary, name: str, values: np.ndarray, deviation: float) -> np.ndarray:
    """Return a weight with its new rows: `values` [old_size, H] -> [size, H]."""
    import numpy as np

    old, tail = values[: vocabulary.first], values[vocabulary.first + vocabulary.count :]
    parts = grown_parts(vocabulary, name, mean_row([old]), deviation)
    return np.concatenate([old, parts.new, tail, parts.padding])


def needs_mean(vocabulary: GrownVocabulary) -> bool:
    """Return whether any row is the mean of others."""
    return vocabulary.init == MEAN or vocabulary.size > vocabulary.kept_until


def mean_row(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Return the mean of all rows of these blocks, summed in float64; the same whatever ranks share the weight."""
    import numpy as np

    total, count = np.zeros([]), 0
    for rows in blocks:
        total, count = total + rows.sum(0, dtype=np.float64), count + len(rows)
    return np.asarray(total / max(1, count))
