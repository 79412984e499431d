"""Stream the weights of a trained model, with adapters merged, and write them in the types asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.build.quantization import base_of_adapters
from erniekit.errors import ModelFileError
from erniekit.export.quantized import WeightFormat, linear_weight_shapes, stored_tensor_specs
from erniekit.export.trained_model import TrainedModel, ignored_config_keys, trained_config
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.lora.peft_files import read_adapters
from erniekit.model.quantization.codes import dequantize, quantize
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.storage.code_offsets import contents_with_offsets, specs_with_offsets
from erniekit.model.storage.layouts import open_weights
from erniekit.model.storage.precision import STORED_TYPES, to_stored
from erniekit.model.storage.shards import weight_files, write_weight_files
from erniekit.model.storage.stacked_tensors import stacked_contents, stacked_specs
from erniekit.model.storage.tied_head import contents_with_head, specs_with_head
from erniekit.progress import progress

TYPE_NAMES = {stored: name for name, stored in STORED_TYPES.items()}
_CHUNK_SIZE = 1 << 20  # values that are rounded at a time


@dataclass(frozen=True)
class TrainedWeights:
    """Trained weights on disk.

    Attributes:
        config: the model's shape.
        shapes: Hugging Face name and shape of every tensor.
        read: yields every tensor in that order; float32 if it was computed, linear weights as [out, in].
    """

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[], Iterator[tuple[str, np.ndarray]]]


def open_trained_weights(model: TrainedModel) -> TrainedWeights:
    """Open the weights of a trained model; read only headers. Adapters are merged onto the base weights that they saw
    in training, which includes the error of quantization.

    Raises:
        ModelFileError: files are missing or damaged, or do not match `config.json`.
    """
    config = trained_config(model)
    shapes, stored = config.weight_shapes(), open_weights(config, model.model_folder)
    if not model.is_adapter:
        return TrainedWeights(config, shapes, lambda: ((name, stored.read(name)) for name in shapes))
    merge, base = read_adapters(model.folder, config).merge, base_of_adapters(model.parameters)

    def read(name: str) -> np.ndarray:
        values = stored.read(name)
        return merge(name, values if base is None else _dequantized_base(base, config.architecture, name, values))

    return TrainedWeights(config, shapes, lambda: ((name, read(name)) for name in shapes))


def _dequantized_base(settings: WeightOnly, architecture: Architecture, name: str, values: np.ndarray) -> np.ndarray:
    """Return a weight, by its Hugging Face name, as the adapters saw it in training; other tensors unchanged."""
    if not architecture.is_linear(name):
        return values
    form = settings.form(name.removesuffix(".weight"), architecture)
    return dequantize(quantize(values, form, name), form)


def stored_types(
    architecture: Architecture, names: Sequence[str], reference: Mapping[str, str], dtype: str | None
) -> dict[str, str]:
    """Return the type each tensor is written in, as safetensors names it.

    Routers depend on small score differences, so they stay float32, as in `transformers`.

    Args:
        reference: types in which the base model stores its tensors.
        dtype: the type the user asks for; None: as in the base model, new tensors in the base's most frequent type.
    """
    known = {name: stored for name, stored in reference.items() if stored in TYPE_NAMES}
    most = Counter(known.values()).most_common(1)
    usual = STORED_TYPES[dtype] if dtype else most[0][0] if most else "F32"
    routers = {name for name in names if architecture.weight_info(name).rule.kind == "router"}
    return {name: "F32" if name in routers else usual if dtype else known.get(name, usual) for name in names}


def write_weights(
    folder: Path,
    weights: TrainedWeights,
    types: Mapping[str, str],
    max_shard_bytes: int,
    form: WeightFormat | None = None,
) -> list[Path]:
    """Round every tensor once to its type and write it; only one tensor at a time is in memory.

    Args:
        form: format of the linear weights; None: their types are among `types`.
    """
    linears = linear_weight_shapes(weights.config) if form else {}

    def contents() -> Iterator[tuple[str, Iterable[Any]]]:
        for name, values in progress(weights.read(), "writing weights", len(weights.shapes), "tensors"):
            if form and name in linears:
                parts = zip(form.tensors(name, linears[name]), form.values(name, values), strict=True)
                yield from ((part, [np.ascontiguousarray(stored).data]) for part, stored in parts)
            else:
                yield name, _rounded(name, values, types[name])

    tensors = stored_tensor_specs(weights.config, types, form)
    stacked = weights.config.architecture.stacked_experts
    if form and stacked:
        raise ModelFileError(
            f"{weights.config.model_type}: files hold the weights of all experts of a layer in one tensor, for which "
            "no quantized format is written.\n  Export the model without quantization."
        )
    specs = specs_with_head(stacked_specs(tensors, stacked), weights.config)
    written = contents_with_head(stacked_contents(contents(), tensors, stacked), weights.config)
    specs = specs_with_offsets(specs, weights.config)
    written = contents_with_offsets(written, weights.config)
    return write_weight_files(folder, specs, written, max_shard_bytes, {"format": "pt"})


def _rounded(name: str, values: np.ndarray, stored: str) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks, because rounding needs additional memory."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK_SIZE):
        yield to_stored(name, flat[start : start + _CHUNK_SIZE], stored).data


def reference_types(model: TrainedModel, config: ModelConfig) -> tuple[Path, dict[str, str]]:
    """Return the base model's folder and the types in which it stores its weights; without a base,
    the trained model's."""
    if model.base is not None and any(weight_files(model.base)):
        try:
            stored = open_weights(_as_base(config, model), model.base)
            return model.base, {name: stored.dtype(name) for name in config.weight_shapes()}
        except ModelFileError:  # the base folder has changed; a model trained in full does not need it
            if model.is_adapter:
                raise
    stored = open_weights(config, model.folder)
    return model.folder, {name: stored.dtype(name) for name in config.weight_shapes()}


def _as_base(config: ModelConfig, model: TrainedModel) -> ModelConfig:
    """Return the shape of a trained model with as many rows as its base has, whose vocabulary it may have grown."""
    assert model.base is not None
    base = ModelConfig.from_folder(model.base, ignored_config_keys(model.parameters))
    return config if config.vocabulary is not None else replace(config, vocab_size=base.vocab_size)
