"""Exporting linear weights in few bits: what a file holds in the place of each, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle

from erniekit.build.quantization import PARAMETER, quantization_from
from erniekit.config import Config
from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.export.trained_model import TrainedModel
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.quantization.codes import quantize
from erniekit.model.quantization.float8 import FP8_MAX, amax, encode, hadamard_rotate
from erniekit.model.quantization.fp8 import AVERAGES_FILE, FORWARD_FORMAT, Average, read_averages
from erniekit.model.quantization.settings import Fp8, WeightOnly
from erniekit.model.storage import float8_tensors, packed_tensors
from erniekit.model.storage.safetensors import StoredTensor

Shape = tuple[int, int]


class WeightFormat(Protocol):
    """How linear weights are written."""

    def tensors(self, name: str, shape: Shape) -> Mapping[str, StoredTensor]:
        """What a file holds in the place of a weight [out, in]. Raises ModelFileError where it cannot be so."""
        ...

    def values(self, name: str, weight: np.ndarray) -> list[np.ndarray]:
        """The bytes of those tensors, in their order."""
        ...

    def config(self, weights: Mapping[str, Shape]) -> dict[str, Any]:
        """`quantization_config` in config.json."""
        ...


@dataclass(frozen=True)
class PackedFormat:
    """Integers or 4-bit normal floats."""

    settings: WeightOnly
    architecture: Architecture

    def tensors(self, name: str, shape: Shape) -> Mapping[str, StoredTensor]:
        return packed_tensors.stored_tensors(name, shape, self._form(name))

    def values(self, name: str, weight: np.ndarray) -> list[np.ndarray]:
        form = self._form(name)
        outputs, inputs = weight.shape
        return packed_tensors.stored_values(quantize(weight, form, name), (outputs, inputs), form)

    def config(self, weights: Mapping[str, Shape]) -> dict[str, Any]:
        return packed_tensors.quantization_config({name: (shape, self._form(name)) for name, shape in weights.items()})

    def _form(self, name: str) -> Any:
        return self.settings.form(name.removesuffix(".weight"), self.architecture)

    def __str__(self) -> str:
        return str(self.settings)


@dataclass(frozen=True)
class Float8Format:
    """e4m3 with one scale for each weight, and one, measured in training, for each layer's activations.

    Attributes:
        averages: of the largest activation, by the path of the layer.
        block: of the rotation in training; 0: none.
    """

    averages: Mapping[str, Average]
    block: int

    def tensors(self, name: str, shape: Shape) -> Mapping[str, StoredTensor]:
        if name.removesuffix(".weight") not in self.averages:
            raise ModelFileError(
                f"{AVERAGES_FILE}: training has seen no activation of {name.removesuffix('.weight')}, which therefore "
                f"has no scale\n  Train longer, or export without {PARAMETER}."
            )
        return float8_tensors.stored_tensors(name, shape)

    @paddle.no_grad()
    def values(self, name: str, weight: np.ndarray) -> list[np.ndarray]:
        rotated = hadamard_rotate(paddle.to_tensor(np.ascontiguousarray(weight, np.float32)), self.block)
        codes, scale = encode(rotated, FORWARD_FORMAT, amax(rotated))
        activations = self.averages[name.removesuffix(".weight")][0] / FP8_MAX[FORWARD_FORMAT]
        return [codes.view("uint8").numpy(), scale.numpy().reshape(1), np.array([activations], np.float32)]

    def config(self, weights: Mapping[str, Shape]) -> dict[str, Any]:
        return float8_tensors.quantization_config(list(weights), self.block)

    def fp8_settings(self) -> Fp8:
        """How a model computes with these weights and scales."""
        return Fp8(hadamard_block=self.block)

    def __str__(self) -> str:
        return "e4m3" + (f", rotated in blocks of {self.block}" if self.block else "")


def weight_format_from(config: Config, model: TrainedModel, architecture: Architecture) -> WeightFormat | None:
    """How `erniekit export` writes linear weights; None: as floats.

    The command line asks for it: what a run's own file says is how it has trained.

    Raises:
        ConfigurationError: 8-bit floats of a model that has not been trained through them.
    """
    if config.origin(PARAMETER) != "command line":
        return None
    quantization = quantization_from(config)
    if quantization is None or isinstance(quantization, WeightOnly):
        return None if quantization is None else PackedFormat(quantization, architecture)
    averages, parameters = read_averages(model.folder), model.parameters
    if not averages:
        raise ConfigurationError(
            f"{PARAMETER}: fp8_linear needs the scales of activations that training through FP8 measures, and "
            f"{model.folder} has no {AVERAGES_FILE}.\n  Write weight_only_int8 or weight_only_int4, which need none."
        )
    block = parameters.get("hadamard_block_size", 0) if parameters.get("apply_hadamard") else 0
    return Float8Format(averages, int(block))


def linear_weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Those of a model's weights that are written so."""
    return {f"{path}.weight": shape for path, shape in config.linear_shapes().items()}


def stored_tensor_specs(
    config: ModelConfig, types: Mapping[str, str], form: WeightFormat | None
) -> dict[str, StoredTensor]:
    """Everything that the files of a model hold, in the order in which it is written."""
    linears = linear_weight_shapes(config) if form else {}
    tensors: dict[str, StoredTensor] = {}
    for name, shape in config.weight_shapes().items():
        tensors |= (
            form.tensors(name, linears[name]) if form and name in linears else {name: StoredTensor(types[name], shape)}
        )
    return tensors
