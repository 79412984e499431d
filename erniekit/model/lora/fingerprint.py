"""A short hash of the weights that adapters were trained on, independent of how they are stored or sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.scores import SCORE
from erniekit.model.decoder import Decoder
from erniekit.model.mapped_weights import rows_by_name
from erniekit.model.vocabulary import vocabulary_weights
from erniekit.model.weights import named_linears, named_weights

AllGatherObject = Callable[[Any], list[Any]]  # gathers a JSON value from every rank that has a part of the model
SAMPLES = 64  # values per weight that enter the hash


def single_process_all_gather(value: Any) -> list[Any]:
    """Return the value of the only process."""
    return [value]


def weights_fingerprint(decoder: Decoder, all_gather_object: AllGatherObject = single_process_all_gather) -> str:
    """Hash the names, the shapes and 64 values of each weight, spread over it.

    The result does not depend on the file layout, on how ranks shard the model, or on whether a run keeps the model's
    multi-token prediction layers. Of a quantized weight the dequantized values count, of a grown vocabulary the rows of
    the tokens that were there before. The score of a reward model, which adapters bring along, does not count.
    """
    all_samples: dict[str, list[float]] = {}
    for samples in all_gather_object(dict(_samples(decoder))):
        all_samples |= samples
    digest = hashlib.sha256()
    for name, shape in decoder.config.weight_shapes().items():
        if name != SCORE and not decoder.config.architecture.is_mtp_weight(name):
            values = np.array(all_samples[name], np.float32)
            digest.update(f"{name} {_decoder_shape(decoder.config, name, shape)} {values.size} ".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()[:16]


def _samples(decoder: Decoder) -> Iterator[tuple[str, list[float]]]:
    shapes = decoder.config.weight_shapes()
    without = {path: linear for path, linear in named_linears(decoder).items() if linear.weight is None}
    dense = ((f"{path}.weight", linear.dense_weight) for path, linear in without.items())
    rows = ((name, layer.mapped.dense()) for name, layer in rows_by_name(decoder).items() if layer.mapped is not None)
    for name, weight in chain(named_weights(decoder).items(), dense, rows):
        shape = _decoder_shape(decoder.config, name, shapes[name])
        size = int(np.prod(shape))
        positions = np.linspace(0, size - 1, min(SAMPLES, size)).astype(np.int64)
        yield name, _values_at(decoder, name, weight, np.unravel_index(positions, shape)).tolist()


def _values_at(decoder: Decoder, name: str, weight: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return float32 values of a weight at indices into the full weight, of which this rank has a shard."""
    tp, axis = decoder.tp, decoder.config.architecture.placement(name).axis
    if tp.size == 1 or axis is None:
        return _pick(weight, indices)
    width = weight.shape[axis]
    within = indices[axis] - tp.rank * width
    is_local = (within >= 0) & (within < width)
    local_indices = tuple(
        np.where(is_local, within, 0) if number == axis else index for number, index in enumerate(indices)
    )
    return tp.sum(paddle.to_tensor(np.where(is_local, _pick(weight, local_indices), np.float32(0)))).numpy()


def _pick(weight: Tensor, indices: tuple[np.ndarray, ...]) -> np.ndarray:
    flat = np.ravel_multi_index(indices, weight.shape)
    return paddle.gather(weight.flatten(), paddle.to_tensor(flat)).astype("float32").numpy()


def _decoder_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> list[int]:
    """Return the shape of a full weight in the decoder's layout, without rows that a grown vocabulary added."""
    if config.vocabulary is not None and name in vocabulary_weights(config):
        return [config.vocabulary.first, *shape[1:]]
    return list(shape[::-1] if config.architecture.is_linear(name) else shape)
