"""The rows of new tokens beside adapters: attach, name, read, merge (`model/vocabulary.py`, `model/new_rows.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from erniekit.model.decoder import Decoder
from erniekit.model.linear import ZEROS
from erniekit.model.new_rows import place_rows
from erniekit.model.vocabulary import NEW_ROWS, new_row_names, vocabulary_weights


def attach_new_rows(decoder: Decoder, stored: Mapping[str, np.ndarray]) -> None:
    """Put the rows of new tokens beside the frozen embedding and head of a grown decoder, to be trained instead of
    theirs if its vocabulary says so.

    Args:
        stored: the rows [n, H] by the name of their weight; where there are none, they begin as those of the weight.
    """
    vocabulary = decoder.config.vocabulary
    if vocabulary is None:
        return
    for name, layer in _layers(decoder).items():
        values = stored[name] if name in stored else _rows_of_weight(decoder, layer)
        layer.new_rows = layer.create_parameter(
            [vocabulary.count, decoder.config.hidden_size], default_initializer=ZEROS
        )
        layer.new_rows.set_value(paddle.to_tensor(values).astype(layer.new_rows.dtype))
        layer.new_rows.stop_gradient = not vocabulary.trained


def named_new_rows(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Return the rows of new tokens that stand beside frozen weights here, as `<path>.new_rows`."""
    names = new_row_names(decoder.config)
    return {
        names[name]: layer.new_rows
        for name, layer in _layers(decoder).items()
        if getattr(layer, NEW_ROWS, None) is not None
    }


@contextmanager
def without_new_rows(decoder: Decoder) -> Iterator[None]:
    """Inside, the rows of new tokens are those that the frozen weights began with."""
    layers = _layers(decoder).values()
    for layer in layers:
        layer.vocabulary.switched_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.vocabulary.switched_off = False


@paddle.no_grad()
def merge_new_rows(decoder: Decoder) -> None:
    """Write the rows of new tokens into their weights and remove them."""
    for layer in _layers(decoder).values():
        rows = layer.vocabulary.place(layer)
        if rows is not None:
            if rows.stop > rows.start:
                layer.weight[rows.start : rows.stop] = rows.local()
            layer.new_rows = None


def _layers(decoder: Decoder) -> dict[str, Any]:
    """Return the layers of this pipeline stage that have a row for each token, by the name of their weight."""
    names = vocabulary_weights(decoder.config)
    layers = {names[0]: decoder.embedding} if hasattr(decoder, "embedding") else {}
    if len(names) > 1 and decoder.pipeline_stage.last:
        layers[names[1]] = decoder.head if decoder.config.architecture.codes is None else decoder.head.text
    return layers


def _rows_of_weight(decoder: Decoder, layer: Any) -> np.ndarray:
    """Return the rows of new tokens in a weight that tensor-parallel ranks may divide; every rank has all of them."""
    vocabulary = decoder.config.vocabulary
    assert vocabulary is not None
    values, tp = paddle.zeros([vocabulary.count, layer.weight.shape[1]], layer.weight.dtype), layer.vocabulary.tp
    rows = place_rows(values, vocabulary.first, tp.rank, layer.weight.shape[0])
    if rows.stop > rows.start:
        values[rows.here] = layer.weight[rows.start : rows.stop]
    return tp.sum(values).astype(paddle.get_default_dtype()).numpy()
