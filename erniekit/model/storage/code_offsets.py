"""Write the tensor that files of the package omnivoice hold beside weights: where the rows of each level's codes begin.

It is a buffer there, computed from the configuration, and its absence would leave it undefined. Nothing reads it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import OFFSETS, code_layout
from erniekit.model.storage.safetensors import StoredTensor


def specs_with_offsets(specs: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the tensors of the files of a model, with the offsets behind them if its family has them."""
    if OFFSETS not in config.architecture.inert_tensors:
        return dict(specs)
    return {**specs, OFFSETS: StoredTensor("I64", (code_layout(config).levels,))}


def contents_with_offsets(
    contents: Iterable[tuple[str, Iterable[Any]]], config: ModelConfig
) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the same names and bytes, and those of the offsets, in the order of `specs_with_offsets`."""
    import numpy as np

    yield from contents
    if OFFSETS in config.architecture.inert_tensors:
        yield OFFSETS, [np.array(code_layout(config).first_rows, np.int64).data]
