"""Export quantized linear weights: the tensors that a file stores for each, and
`quantization_config` in config.json."""

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
from erniekit.model.architectures.parts import decoder_linears
from erniekit.model.quantization.codes import quantize
from erniekit.model.quantization.float8 import FP8_MAX, amax, encode, hadamard_rotate
from erniekit.model.quantization.fp8 import AVERAGES_FILE, FORWARD_FORMAT, Average, read_averages
from erniekit.model.quantization.settings import Fp8, WeightOnly
from erniekit.model.storage import float8_tensors, packed_tensors
from erniekit.model.storage.safetensors import StoredTensor

Shape = tuple[int, int]


class WeightFormat(Protocol):
    """A format in which linear weights are written."""

    def tensors(self, name: str, shape: Shape) -> Mapping[str, StoredTensor]:
        """Return the tensors that a file stores for a weight [out, in]. Raises ModelFileError if the format cannot
        store it."""
        ...

    def values(self, name: str, weight: np.ndarray) -> list[np.ndarray]:
        """Return the values of those tensors, in their order."""
        ...

    def config(self, weights: Mapping[str, Shape]) -> dict[str, Any]:
        """Return `quantization_config` for config.json."""
        ...


@dataclass(frozen=True)
class PackedFormat:
    """Weights packed as integers or as 4-bit normal floats."""

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
    """e4m3 weights with one scale per weight, and per layer one scale of activations, measured in training.

    Attributes:
        averages: of the largest activation, by the path of the layer.
        block: block size of the Hadamard rotation in training; 0: none.
    """

    averages: Mapping[str, Average]
    block: int

    def tensors(self, name: str, shape: Shape) -> Mapping[str, StoredTensor]:
        if name.removesuffix(".weight") not in self.averages:
            raise ModelFileError(
                f"{AVERAGES_FILE}: training measured no activation of {name.removesuffix('.weight')}, so it "
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
        """Return the settings with which a model computes through these weights and scales."""
        return Fp8(hadamard_block=self.block)

    def __str__(self) -> str:
        return "e4m3" + (f", rotated in blocks of {self.block}" if self.block else "")


def weight_format_from(config: Config, model: TrainedModel, architecture: Architecture) -> WeightFormat | None:
    """How `erniekit export` writes linear weights; None: as floats.

    Only the command line selects it: the run's own file says how the run was trained.

    Raises:
        ConfigurationError: 8-bit floats are asked for, but the model was not trained through them.
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
            f"{model.folder} has no {AVERAGES_FILE}.\n  Use weight_only_int8 or weight_only_int4, which need no scales."
        )
    block = parameters.get("hadamard_block_size", 0) if parameters.get("apply_hadamard") else 0
    return Float8Format(averages, int(block))


def linear_weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes [out, in] of the weights that are written in the quantized format."""
    return {f"{path}.weight": shape for path, shape in decoder_linears(config).items()}


def stored_tensor_specs(
    config: ModelConfig, types: Mapping[str, str], form: WeightFormat | None
) -> dict[str, StoredTensor]:
    """Return every tensor that the files of a model contain, in the order in which it is written."""
    linears = linear_weight_shapes(config) if form else {}
    tensors: dict[str, StoredTensor] = {}
    for name, shape in config.weight_shapes().items():
        tensors |= (
            form.tensors(name, linears[name]) if form and name in linears else {name: StoredTensor(types[name], shape)}
        )
    return tensors
