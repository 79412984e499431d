"""Read the weights of a folder as those of a model with more tokens (`model/vocabulary.py`). Needs no Paddle.

Rows of the embedding and of an untied head are those of the files, to the bit, but in the places of new tokens and
behind all rows of the files: these are made while they are read. Everything else is read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.vocabulary import GrownParts, grown_parts, mean_row, needs_mean, vocabulary_weights

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.storage.layouts import Layout, StoredWeights
    from erniekit.model.storage.matrix_reading import StoredMatrix
    from erniekit.model.storage.wrapped_weights import WrappedWeights


class GrownWeights:
    """The weights of a folder, grown; its methods are those of `StoredWeights`.

    Args:
        stored: the weights as the files have them.
        config: of the grown model.
    """

    def __init__(self, stored: StoredWeights | WrappedWeights, config: ModelConfig) -> None:
        assert config.vocabulary is not None
        self._stored, self._vocabulary, self._deviation = stored, config.vocabulary, config.initializer_range
        self._grown = frozenset(vocabulary_weights(config))

    @property
    def layout(self) -> Layout:
        return self._stored.layout

    def dtype(self, name: str) -> str:
        """Return the type in which a weight is stored."""
        return self._stored.dtype(name)

    def is_transposed(self, name: str) -> bool:
        """Return whether `row_blocks` yields rows of the transpose of what Hugging Face stores."""
        return self._stored.is_transposed(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight of the grown model, in the file's order of axes."""
        first, second, *_ = (*self._stored.shape(name), 0)
        if name not in self._grown:
            return self._stored.shape(name)
        return (first, self._vocabulary.size) if self.is_transposed(name) else (self._vocabulary.size, second)

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return where a weight lies in a file as it is; None for those that are grown."""
        return None if name in self._grown else self._stored.matrix(name)

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield row numbers and rows as `StoredWeights.row_blocks` does."""
        import numpy as np

        if name not in self._grown:
            yield from self._stored.row_blocks(name, wanted)
            return
        vocabulary, parts = self._vocabulary, self._parts(name)
        end = vocabulary.first + vocabulary.count
        if self.is_transposed(name):
            new, padding = parts.new.T, parts.padding.T
            for rows, values in self._stored.row_blocks(name, wanted):
                pieces = [values[:, : vocabulary.first], new[rows], values[:, end:], padding[rows]]
                yield rows, np.concatenate(pieces, 1)
            return
        own = range(vocabulary.size) if wanted is None else wanted
        yield from self._kept(name, _common(own, range(vocabulary.first)))
        yield from _rows_of(parts.new, vocabulary.first, own)
        yield from self._kept(name, _common(own, range(end, vocabulary.old_size)))
        yield from _rows_of(parts.padding, vocabulary.kept_until, own)

    def _kept(self, name: str, rows: range) -> Iterator[tuple[slice, np.ndarray]]:
        if rows:
            yield from self._stored.row_blocks(name, rows)

    def read(self, name: str) -> np.ndarray:
        """Return one full weight as Hugging Face stores it."""
        import numpy as np

        values = self._stored.read(name)
        if name not in self._grown:
            return values
        vocabulary, parts = self._vocabulary, self._parts(name)
        tail = values[vocabulary.first + vocabulary.count :]
        return np.concatenate([values[: vocabulary.first], parts.new, tail, parts.padding])

    def tied_weights_that_differ(self, config: ModelConfig) -> list[str]:
        """Return a problem if the embedding and a stored copy of it as the head differ; both are read."""
        return self._stored.tied_weights_that_differ(config)

    def _parts(self, name: str) -> GrownParts:
        return grown_parts(self._vocabulary, name, self._mean(name), self._deviation)

    def _mean(self, name: str) -> np.ndarray:
        """Return the mean of the rows of earlier tokens, [H]; zeros where no row needs it."""
        import numpy as np

        first, transposed = self._vocabulary.first, self.is_transposed(name)
        if not needs_mean(self._vocabulary):
            return np.zeros(self._stored.shape(name)[0 if transposed else 1])
        if transposed:
            blocks = self._stored.row_blocks(name)
            return np.concatenate([values[:, :first].mean(1, dtype=np.float64) for _, values in blocks])
        return mean_row(values for _, values in self._stored.row_blocks(name, range(first)))


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _rows_of(values: np.ndarray, start: int, wanted: range) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield those of the rows, which are numbered from `start`, that are wanted."""
    rows = _common(wanted, range(start, start + len(values)))
    if rows:
        yield slice(rows.start, rows.stop), values[rows.start - start : rows.stop - start]
