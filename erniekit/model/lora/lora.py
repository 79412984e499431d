"""Low-rank adapters on the frozen linear layers of a decoder: LoRA, rsLoRA, DoRA, PiSSA; add, load, save, merge."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle
from paddle import nn

from erniekit.errors import ConfigurationError
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.scores import SCORE
from erniekit.model.cpu_gradients import linear as product
from erniekit.model.decoder import Decoder
from erniekit.model.linear import ZEROS, Linear
from erniekit.model.local_tensors import FullTensors, LocalTensors, SingleProcessTensors, local_tensors
from erniekit.model.lora.config import PISSA, LoraSettings, adapter_targets
from erniekit.model.lora.fingerprint import AllGatherObject, single_process_all_gather, weights_fingerprint
from erniekit.model.lora.init import MIN_COLUMN_NORM, Factors, initial_factors, principal_factors
from erniekit.model.lora.new_rows import attach_new_rows, merge_new_rows, named_new_rows, without_new_rows
from erniekit.model.lora.peft_files import StoredAdapters, read_adapters, write_adapters
from erniekit.model.moe.router import GateStatistics
from erniekit.model.randomness import Randomness, Site, dropout
from erniekit.model.vocabulary import new_row_names
from erniekit.model.weights import named_linears, named_weights


class LowRankAdapter(nn.Layer):
    """Adds scaling * dropout(x) A B to the output of its linear layer.

    With DoRA, output o becomes magnitude[o] * (x W')[o] / ||W'[:, o]||, where W' = W + scaling * A B; the norm is a
    constant in the backward pass (section 4.3 of the paper). Dropout applies to the adapter's branch only.
    """

    def __init__(self, linear: Linear, path: str, factors: Factors, settings: LoraSettings, base: AdapterBase) -> None:
        super().__init__()
        self.settings, self.base, self.start = settings, base, factors.start
        self.scaling = settings.scaling_of(path)
        self._randomness, self._site_key = base.randomness, zlib.crc32(path.encode())
        divided = linear.is_row_parallel or linear.tp.size == 1  # input channels, or tokens (experts)
        self._shard = linear.tp.rank if divided else 0
        self._sum = linear.tp.sum if linear.is_row_parallel else _identity
        self.lora_A = self._parameter(_local_shard(base, linear, f"{path}.lora_A", factors.A))
        self.lora_B = self._parameter(_local_shard(base, linear, f"{path}.lora_B", factors.B))
        self.lora_magnitude_vector = None
        if settings.dora:
            with paddle.no_grad():
                weight = linear.dense_weight
                self._weight_square = self._sum(weight.square().sum(0))
                if factors.magnitude is None:
                    magnitude = self.column_norms(weight).numpy()
                else:
                    magnitude = _local_shard(base, linear, f"{path}.lora_magnitude_vector", factors.magnitude)
                self.lora_magnitude_vector = self._parameter(magnitude)

    def forward(self, x: paddle.Tensor, output: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        probability = self.settings.dropout * self._randomness.dropout_scale if self.training else 0.0
        x = dropout(x, probability, self._randomness.key(self._site_key, Site.ADAPTER_INPUT, self._shard))
        update = product(product(x, self.lora_A, None) * self.scaling, self.lora_B, None)
        if self.lora_magnitude_vector is None:
            return output + update
        with paddle.no_grad():
            norms = self.column_norms(linear.dense_weight)
        if linear.bias is None or linear.is_row_parallel:  # or the bias is added after the sum
            return (output + update) * (self.lora_magnitude_vector / norms)
        return (output - linear.bias + update) * (self.lora_magnitude_vector / norms) + linear.bias

    def column_norms(self, weight: paddle.Tensor) -> paddle.Tensor:
        """Return ||W + scaling * A B|| of every output, [out], from A'W, A'A and B, without forming the product."""
        a, b, s = self.lora_A, self.lora_B, self.scaling
        crossed = (self._sum(paddle.matmul(a, weight, transpose_x=True)) * b).sum(0)
        own = (paddle.matmul(self._sum(paddle.matmul(a, a, transpose_x=True)), b) * b).sum(0)
        return (self._weight_square + 2 * s * crossed + s * s * own).clip(min=MIN_COLUMN_NORM**2).sqrt()

    def effective_weight(self, weight: paddle.Tensor) -> paddle.Tensor:
        """Return the weight [in, out] with which the linear layer alone computes the same."""
        with paddle.no_grad():
            merged = weight + self.scaling * paddle.matmul(self.lora_A, self.lora_B)
            if self.lora_magnitude_vector is None:
                return merged
            return merged * (self.lora_magnitude_vector / merged.square().sum(0).clip(min=MIN_COLUMN_NORM**2).sqrt())

    def _parameter(self, values: np.ndarray) -> paddle.Tensor:
        parameter = self.create_parameter(list(values.shape), default_initializer=ZEROS)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(values)).astype(parameter.dtype))
        return parameter


def _identity(values: paddle.Tensor) -> paddle.Tensor:
    return values


def _local_shard(base: AdapterBase, linear: Linear, name: str, values: np.ndarray) -> np.ndarray:
    """Return this rank's shard of a parameter of a linear layer or of its adapter."""
    return linear.tp.local_shard(values, base.architecture.placement(name).axis)


def full_weight(base: AdapterBase, linear: Linear, path: str) -> np.ndarray:
    """All-gather a weight [in, out] over the tensor-parallel group; every rank of the group must call this."""
    return linear.tp.all_gather(linear.dense_weight, base.architecture.placement(f"{path}.weight").axis)


class AdapterBase(NamedTuple):
    """State that all adapters of a decoder share, in addition to their settings."""

    randomness: Randomness
    fingerprint: str  # of the weights that the adapters belong to (`weights_fingerprint`)
    architecture: Architecture


class DecoderAdapters(NamedTuple):
    """The adapters of a decoder (`Decoder.adapters`): the same on all ranks, even on a rank without
    an adapted layer."""

    settings: LoraSettings
    base: AdapterBase


def add_adapters(
    decoder: Decoder,
    settings: LoraSettings,
    *,
    seed: int,
    all_gather_object: AllGatherObject = single_process_all_gather,
) -> None:
    """Freeze the decoder and add new adapters to its linear layers, and the rows of new tokens if it is grown.

    Args:
        all_gather_object: over the ranks that share the decoder.

    Raises:
        ConfigurationError: a pattern matches no layer, or PiSSA needs more singular values than a weight has.
    """
    base = freeze(decoder, all_gather_object)
    linears, shapes = named_linears(decoder), decoder.config.weight_shapes()
    targets = adapter_targets(decoder.config, settings.target_modules)  # of the model; not all of it is here
    for path in (path for path in targets if path in linears):
        linear, rank = linears[path], settings.rank_of(path)
        if settings.init == PISSA:
            factors = principal_factors(path, full_weight(base, linear, path), rank, settings.scaling_of(path))
        else:
            outputs, inputs = shapes[f"{path}.weight"]
            factors = initial_factors(path, (inputs, outputs), rank, seed)
        attach_adapter(linear, path, factors, settings, base)
    attach_new_rows(decoder, {})
    decoder.adapters = DecoderAdapters(settings, base)


def freeze(decoder: Decoder, all_gather_object: AllGatherObject = single_process_all_gather) -> AdapterBase:
    """Freeze every weight of the decoder but a score. Call it before any weight changes: it computes a fingerprint."""
    fingerprint = weights_fingerprint(decoder, all_gather_object)
    for parameter in decoder.parameters():
        parameter.stop_gradient = True
    for score in _named_score(decoder).values():
        score.stop_gradient = False
    return AdapterBase(decoder.randomness, fingerprint, decoder.config.architecture)


def attach_adapter(linear: Linear, path: str, factors: Factors, settings: LoraSettings, base: AdapterBase) -> None:
    """Attach an adapter to a frozen linear layer; PiSSA's initial update is subtracted from the weight.

    Raises:
        ConfigurationError: PiSSA is asked for on a quantized weight.
    """
    if factors.start is not None:
        if linear.weight is None:
            raise ConfigurationError(
                f"{path}: PiSSA subtracts singular values from the weight, which weight_quantize_algo has quantized, "
                "so it would be rounded twice.\n  Set lora_init: kaiming, or weight_quantize_algo: none."
            )
        parts = zip(("lora_A", "lora_B"), factors.start, strict=True)
        own = (np.ascontiguousarray(_local_shard(base, linear, f"{path}.{name}", values)) for name, values in parts)
        a, b = (paddle.to_tensor(values).astype(linear.weight.dtype) for values in own)
        with paddle.no_grad():
            linear.weight.set_value(linear.weight - settings.scaling_of(path) * paddle.matmul(a, b))
    linear.adapter = LowRankAdapter(linear, path, factors, settings, base)


def named_adapters(decoder: Decoder) -> dict[str, LowRankAdapter]:
    """Return the adapter of every linear layer that has one, by the layer's path."""
    return {
        path: linear.adapter
        for path, linear in named_linears(decoder).items()
        if isinstance(linear.adapter, LowRankAdapter)
    }


def named_adapter_weights(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Return the adapters' parameters as `<path>.lora_A`, `<path>.lora_B` and `<path>.lora_magnitude_vector`, and the
    rows of new tokens as `<path>.new_rows`, and a score under its own name."""
    of_linears = {
        f"{path}.{name}": parameter
        for path, adapter in named_adapters(decoder).items()
        for name, parameter in adapter.named_parameters()
    }
    return of_linears | named_new_rows(decoder) | _named_score(decoder)


def _named_score(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Return the weight of a reward model's score, which is trained beside adapters as a whole, if it is here."""
    here = decoder.config.scored and decoder.pipeline_stage.last
    return {SCORE: decoder.head.weight} if here else {}


@contextmanager
def without_adapters(decoder: Decoder) -> Iterator[None]:
    """Disable the adapters inside the context; rows of new tokens are then those that the base began with."""
    adapters = named_adapters(decoder)
    linears = named_linears(decoder)
    for path in adapters:
        linears[path].adapter = None
    try:
        with without_new_rows(decoder):
            yield
    finally:
        for path, adapter in adapters.items():
            linears[path].adapter = adapter


def named_trainable_parameters(decoder: Decoder) -> dict[str, paddle.Tensor]:
    """Return this rank's trainable parameters by name: those of the adapters, or all weights of a decoder without
    adapters."""
    return named_weights(decoder) if decoder.adapters is None else named_adapter_weights(decoder)


def describe_adapters(decoder: Decoder) -> str:
    """Describe the kind of the adapters and this rank's number of layers and parameters."""
    rows = sum(parameter.size for parameter in named_new_rows(decoder).values())
    count = sum(parameter.size for parameter in named_adapter_weights(decoder).values()) - rows
    described = f"{decoder.adapters.settings}, on {len(named_adapters(decoder))} linear layers, {count:,} parameters"
    vocabulary = decoder.config.vocabulary
    if vocabulary is None:
        return described
    trained = "trained" if vocabulary.trained else "frozen (train_added_tokens: false)"
    return f"{described}; rows of {vocabulary.count:,} new tokens, {rows:,} parameters, {trained}"


def base_fingerprint(decoder: Decoder) -> str:
    """Return the fingerprint of the frozen weights under the decoder's adapters; "" without adapters."""
    return "" if decoder.adapters is None else decoder.adapters.base.fingerprint


def load_adapters(
    decoder: Decoder,
    folder: Path | str,
    *,
    dropout: float = 0.0,
    all_gather_object: AllGatherObject = single_process_all_gather,
) -> bool:
    """Freeze the decoder and add the adapters of `folder` to its linear layers.

    Args:
        dropout: of the adapters in further training.
        all_gather_object: over the ranks that share the decoder.

    Returns:
        False if the adapters were trained on other weights than the decoder's; True if on these, or if it is unknown.

    Raises:
        ModelFileError: see `peft_files.read_adapters`.
    """
    stored = read_adapters(folder, decoder.config)
    base = freeze(decoder, all_gather_object)
    linears = named_linears(decoder)
    settings = replace(stored.settings, dropout=dropout)
    for path in (path for path in stored.factors if path in linears):
        weight = full_weight(base, linears[path], path)
        attach_adapter(linears[path], path, stored.complete(path, weight), settings, base)
    attach_new_rows(decoder, stored.new_rows)
    for score in _named_score(decoder).values():
        assert stored.score is not None, "it has been read with the adapters"
        score.set_value(paddle.to_tensor(decoder.tp.local_shard(stored.score, 1)).astype(score.dtype))
    decoder.adapters = DecoderAdapters(settings, base)
    return stored.base_fingerprint in ("", base.fingerprint)


def local_adapters(decoder: Decoder) -> LocalTensors:
    """Return the adapters' parameters, and PiSSA's initial factors as `<path>.start_A` and `.start_B`."""
    starts = {
        f"{path}.start_{letter}": paddle.to_tensor(values, paddle.get_default_dtype())
        for path, adapter in named_adapters(decoder).items()
        for letter, values in zip("AB", adapter.start or (), strict=False)
    }
    return local_tensors({**named_adapter_weights(decoder), **starts})


def save_adapters(
    decoder: Decoder, folder: Path | str | None, base_model: str, full_tensors: FullTensors | None = None
) -> list[Path]:
    """Write the decoder's adapters in PEFT's format; see `peft_files.write_adapters`.

    Args:
        folder: None on ranks that only send their shards.
        full_tensors: `local_adapters` of all ranks; default: those of this decoder.
    """
    full_tensors = full_tensors or SingleProcessTensors(local_adapters(decoder))
    values = {name: full_tensors.read(name) for name in full_tensors.names}
    if folder is None:
        return []
    rows_of = {rows: weight for weight, rows in new_row_names(decoder.config).items()}
    paths = dict.fromkeys(
        name.rpartition(".")[0] for name in full_tensors.names if name not in rows_of and name != SCORE
    )
    order = [path for path in (name.rpartition(".")[0] for name in decoder.config.weight_shapes()) if path in paths]
    factors = {path: _factors(values, path) for path in dict.fromkeys(order)}
    new_rows = {weight: rows for name, weight in rows_of.items() if (rows := values.get(name)) is not None}
    stored = StoredAdapters(
        decoder.adapters.settings, factors, base_fingerprint(decoder), new_rows, score=values.get(SCORE)
    )
    return write_adapters(folder, stored, decoder.config, base_model)


def _factors(values: Mapping[str, np.ndarray | None], path: str) -> Factors:
    a, b = values[f"{path}.lora_A"], values[f"{path}.lora_B"]
    start_a, start_b = values.get(f"{path}.start_A"), values.get(f"{path}.start_B")
    assert a is not None and b is not None  # on the rank that writes
    start = None if start_a is None or start_b is None else (start_a, start_b)
    return Factors(a, b, values.get(f"{path}.lora_magnitude_vector"), start)


# Merging adapters into the frozen weights, in float32.


def merge_adapters(decoder: Decoder) -> None:
    """Merge every adapter into its weight in place and remove it; all weights become trainable, quantized ones as
    dense.

    For files instead of a decoder, tensor by tensor, see `peft_files.read_adapters` and `init.merged_weight`.
    """
    adapters = named_adapters(decoder)
    for path, linear in named_linears(decoder).items():
        if path in adapters:
            linear.set_dense_weight(adapters[path].effective_weight(linear.dense_weight))
            linear.adapter = None
        elif linear.weight is None:
            linear.set_dense_weight(linear.dense_weight)
    merge_new_rows(decoder)
    decoder.adapters = None
    for layer in decoder.sublayers():
        for parameter in layer.parameters(include_sublayers=False):
            parameter.stop_gradient = isinstance(layer, GateStatistics)  # gradients never reach it
