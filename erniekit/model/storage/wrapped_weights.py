"""Read the weights of a decoder as those of a model that writes codes, or gives a score (`ModelConfig.wrapped`). Needs
no Paddle.

The decoder's weights are those of the files, to the bit, under the names that they have in the new model; its head of
tokens is left out. Tables and heads of codes, or the score, are drawn while they are read, from the seed of the run and
their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.scores import SCORE
from erniekit.model.architectures.speaking import decoder_names

if TYPE_CHECKING:
    import numpy as np

    from erniekit.model.storage.layouts import Layout, StoredWeights
    from erniekit.model.storage.matrix_reading import StoredMatrix


class WrappedWeights:
    """The weights of a folder, wrapped; its methods are those of `StoredWeights`.

    Args:
        stored: the weights as the files have them.
        config: of the model that writes codes.
    """

    def __init__(self, stored: StoredWeights, config: ModelConfig) -> None:
        assert config.wrapped is not None
        self._stored, self._config, self._seed = stored, config, config.wrapped.seed
        self._shapes = config.weight_shapes()
        self._names = {name: name for name in self._shapes if name != SCORE} if config.scored else decoder_names(config)

    @property
    def layout(self) -> Layout:
        return self._stored.layout

    def dtype(self, name: str) -> str:
        """Return the type in which a weight is stored; what is drawn is float32."""
        return self._stored.dtype(self._names[name]) if name in self._names else "F32"

    def is_transposed(self, name: str) -> bool:
        """Return whether `row_blocks` yields rows of the transpose of what Hugging Face stores."""
        return name in self._names and self._stored.is_transposed(self._names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, in the file's order of axes."""
        return self._stored.shape(self._names[name]) if name in self._names else self._shapes[name]

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return where a weight lies in a file as it is; None for those that are drawn."""
        return self._stored.matrix(self._names[name]) if name in self._names else None

    def row_blocks(self, name: str, wanted: range | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield row numbers and rows as `StoredWeights.row_blocks` does."""
        if name in self._names:
            yield from self._stored.row_blocks(self._names[name], wanted)
            return
        from erniekit.model.initial_weights import initial_blocks

        own = range(self._shapes[name][0]) if wanted is None else wanted
        for rows, values in initial_blocks(name, self._shapes[name], self._config, self._seed):
            first, last = max(rows.start, own.start), min(rows.stop, own.stop)
            if first < last:
                yield slice(first, last), values[first - rows.start : last - rows.start]

    def read(self, name: str) -> np.ndarray:
        """Return one full weight as Hugging Face stores it."""
        if name in self._names:
            return self._stored.read(self._names[name])
        from erniekit.model.initial_weights import initial_weight

        return initial_weight(name, self._shapes[name], self._config, self._seed)

    def tied_weights_that_differ(self, config: ModelConfig) -> list[str]:
        """Return a problem if the decoder's embedding and a stored copy of it as the head differ; both are read."""
        assert self._config.wrapped is not None
        return self._stored.tied_weights_that_differ(self._config.wrapped.config)
