"""Which weights adapters were trained beside: a short hash that names them, however they are stored or divided."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.decoder import Decoder
from erniekit.model.placement import placement
from erniekit.model.storage.weight_layouts import of_prediction
from erniekit.model.weights import is_transposed, named_weights, packed_weights

Exchange = Callable[[Any], list[Any]]  # what every rank that has a part of the model has given; values are JSON
SAMPLES = 64  # values of every weight that are looked at


def alone(value: Any) -> list[Any]:
    """The exchange of a process that has the whole model."""
    return [value]


def weights_fingerprint(decoder: Decoder, exchange: Exchange = alone) -> str:
    """A short hash of names, shapes and 64 values of each weight, spread over it; the same for any file layout, for any
    division among ranks, and whether a run has the model's multi-token prediction layers or leaves them out.

    Of a weight in few bits the values count that its codes stand for."""
    of_all: dict[str, list[float]] = {}
    for samples in exchange(dict(_samples(decoder))):
        of_all |= samples
    digest = hashlib.sha256()
    for name, shape in decoder.config.weight_shapes().items():
        if not of_prediction(name):
            values = np.array(of_all[name], np.float32)
            digest.update(f"{name} {_turned(name, shape)} {values.size} ".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def _samples(decoder: Decoder) -> Iterator[tuple[str, list[float]]]:
    shapes = decoder.config.weight_shapes()
    dense = ((name, weight.dense().t()) for name, weight in packed_weights(decoder).items())
    for name, weight in chain(named_weights(decoder).items(), dense):
        shape = _turned(name, shapes[name])
        size = int(np.prod(shape))
        places = np.linspace(0, size - 1, min(SAMPLES, size)).astype(np.int64)
        yield name, _values_at(decoder, name, weight, np.unravel_index(places, shape)).tolist()


def _values_at(decoder: Decoder, name: str, weight: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    """float32 values of a weight at places of the whole of it, this rank's slice of which is here."""
    tensor, axis = decoder.tensor, placement(name).axis
    if tensor.size == 1 or axis is None:
        return _pick(weight, indices)
    width = weight.shape[axis]
    within = indices[axis] - tensor.rank * width
    here = (within >= 0) & (within < width)
    own = tuple(np.where(here, within, 0) if number == axis else index for number, index in enumerate(indices))
    return tensor.sum(paddle.to_tensor(np.where(here, _pick(weight, own), np.float32(0)))).numpy()


def _pick(weight: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    flat = np.ravel_multi_index(indices, weight.shape)
    return paddle.gather(weight.flatten(), paddle.to_tensor(flat)).astype("float32").numpy()


def _turned(name: str, shape: tuple[int, ...]) -> list[int]:
    """The shape of a whole weight as the decoder has it."""
    return list(shape[::-1] if is_transposed(name) else shape)
