"""The weights of a trained model as a stream of tensors, adapters merged, and the types they are written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.adapters.files import read_adapters
from erniekit.model.configuration import ModelConfig
from erniekit.model.storage.precision import STORED_TYPES, to_stored
from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.storage.shards import weight_files, write_weight_files
from erniekit.model.storage.weight_layouts import open_weights
from erniekit.runners.trained_model import TrainedModel

TYPE_NAMES = {stored: name for name, stored in STORED_TYPES.items()}
_PIECE = 1 << 20  # values that are rounded at once


@dataclass(frozen=True)
class TrainedWeights:
    """Trained weights on disk.

    Attributes:
        config: the model's shape.
        shapes: every tensor's Hugging Face name and shape.
        read: yields every tensor in that order; float32 where anything was computed, linears as [out, in].
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]


def open_trained_weights(model: TrainedModel) -> TrainedWeights:
    """The weights of a trained model, adapters merged; nothing but headers is read yet.

    Raises:
        ModelFileError: files are missing or damaged, or do not fit `config.json`.
    """
    config = ModelConfig.from_folder(model.model_folder)
    shapes, stored = config.weight_shapes(), open_weights(config, model.model_folder)
    if not model.is_adapter:
        return TrainedWeights(config, shapes, lambda: ((name, stored.read(name)) for name in shapes))
    merge = read_adapters(model.folder, shapes).merge
    return TrainedWeights(config, shapes, lambda: ((name, merge(name, stored.read(name))) for name in shapes))


def stored_types(names: Sequence[str], reference: Mapping[str, str], dtype: str | None) -> dict[str, str]:
    """The type each tensor is written in, as safetensors names it.

    Args:
        reference: the types in which the base model stores its tensors.
        dtype: what the user asks for; None: each tensor as its base has it, new ones as most of the base.
    """
    known = {name: stored for name, stored in reference.items() if stored in TYPE_NAMES}
    most = Counter(known.values()).most_common(1)
    usual = STORED_TYPES[dtype] if dtype else most[0][0] if most else "F32"
    return {name: "F32" if _is_router(name) else usual if dtype else known.get(name, usual) for name in names}


def write_weights(folder: Path, weights: TrainedWeights, types: Mapping[str, str], max_shard_bytes: int) -> list[Path]:
    """Round every tensor once to its type and write it; a tensor at a time is in memory."""
    tensors = {name: StoredTensor(types[name], shape) for name, shape in weights.shapes.items()}
    contents = ((name, _rounded(name, values, types[name])) for name, values in weights.read())
    return write_weight_files(folder, tensors, contents, max_shard_bytes, {"format": "pt"})


def _rounded(name: str, values: np.ndarray, stored: str) -> Iterator[memoryview]:
    """A tensor's bytes, piece by piece, for rounding takes room beside the values."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield to_stored(name, flat[start : start + _PIECE], stored).data


def _is_router(name: str) -> bool:
    """Routers decide by small differences between their scores, so `transformers` keeps them in float32, too."""
    return not {"gate", "moe_statics"}.isdisjoint(name.split("."))


def reference_types(model: TrainedModel, config: ModelConfig) -> tuple[Path, dict[str, str]]:
    """The base and the types in which it stores its weights, or, where it has none, the same of the trained model."""
    if model.base is not None and any(weight_files(model.base)):
        try:
            stored = open_weights(config, model.base)
            return model.base, {name: stored.dtype(name) for name in config.weight_shapes()}
        except ModelFileError:  # the folder has changed since; a model that was trained in full does not need it
            if model.is_adapter:
                raise
    stored = open_weights(config, model.folder)
    return model.folder, {name: stored.dtype(name) for name in config.weight_shapes()}
