"""Training through 8-bit floats: the inputs of a linear product are rounded to e4m3, gradients pass straight through.

    y = Q(x H) Q(W^T H)^T        dx = g Q(W^T H) H        dW = (Q(x H) H)^T g

with g = dy, or dy in 8 bits. H, a block-diagonal Hadamard matrix, is symmetric and orthogonal, so it cancels in the
product: it only spreads outliers before rounding. Every tensor has one scale. For a weight or a gradient it follows
from the tensor's largest value; for activations from the batch's largest value in the first steps, and from a moving
average afterwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.errors import ConfigurationError, ModelFileError
from erniekit.json_files import read_json_object
from erniekit.model.autograd import apply, autocast_operand, filter_gradients, needs_grad
from erniekit.model.device import has_fp8_products
from erniekit.model.linear import Linear
from erniekit.model.lora.fingerprint import AllGatherObject, single_process_all_gather
from erniekit.model.quantization.float8 import Float8, amax, encode, hadamard_rotate
from erniekit.model.quantization.settings import Fp8, rotation_problem
from erniekit.model.randomness import Randomness

FORWARD_FORMAT = "e4m3"
HALF = (paddle.float16, paddle.bfloat16)  # output types of the device's product
_GEMM_SCALE = 2.0**-18  # factor on the device's product: two codes alone reach 2^17.6, and float16 ends at 2^16
AVERAGES_FILE = "activation_scales.json"
Average = tuple[float, int]  # of a step's largest absolute activation, and the number of steps
AllReduceMax = Callable[[np.ndarray], np.ndarray]  # this rank's values -> their elementwise maximum over all ranks


def single_process_all_reduce_max(figures: np.ndarray) -> np.ndarray:
    """Return the values of the only process."""
    return figures


class Fp8Product(nn.Layer):
    """A `Linear.product` through FP8. The linear layer keeps the weight in full precision and trains it."""

    def __init__(self, shared: ActivationScales) -> None:
        super().__init__()
        self.shared = shared
        self.average, self.steps = 0.0, 0
        self.observed_amax: paddle.Tensor | None = None  # the largest absolute activation of this step so far

    def forward(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        return apply(_Product, autocast_operand(x), linear.weight, self, linear)

    def activation_amax(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        """Return the value, 0-d, that sets the scale of rotated activations. A recomputed layer observes it again."""
        if not self.training and self.steps:
            return paddle.to_tensor(self.average)
        largest = amax(x)
        if linear.is_row_parallel:  # this rank has a shard of the channels
            largest = linear.tp.maximum(largest)
        if self.training:
            self.observed_amax = largest if self.observed_amax is None else paddle.maximum(self.observed_amax, largest)
            if self.steps and not self.shared.uses_current_scaling:
                return paddle.to_tensor(self.average)
        return largest

    def weight_codes(self, linear: Linear) -> Float8:
        """Return the rotated weight [out, in] in 8 bits; ranks that shard it use the scale of the full weight."""
        kept = self.shared.cached_codes
        if kept is not None and self in kept:
            return kept[self]
        rotated = hadamard_rotate(linear.weight.t(), self.shared.settings.hadamard_block)
        codes = encode(rotated, FORWARD_FORMAT, linear.tp.maximum(amax(rotated)))
        if kept is not None:
            kept[self] = codes
        return codes

    def end_step(self, observed_amax: float) -> None:
        """Update the moving average with the largest activation of a step, over all micro-batches and ranks."""
        weight = max(self.shared.settings.actscale_moving_rate, 1 / (self.steps + 1))
        self.average += weight * (observed_amax - self.average)
        self.steps += 1


class ActivationScales:
    """State that the FP8 products of a decoder share; the training loop calls `end_step` after each step.

    Attributes:
        products: by the path of their linear layer.
        cached_codes: of weights, while these do not change.
    """

    def __init__(
        self,
        settings: Fp8,
        randomness: Randomness,
        all_gather_object: AllGatherObject = single_process_all_gather,
        all_reduce_max: AllReduceMax = single_process_all_reduce_max,
    ) -> None:
        self.settings, self._randomness, self._all_gather_object, self._all_reduce_max = (
            settings,
            randomness,
            all_gather_object,
            all_reduce_max,
        )
        self._paths: list[str] | None = None  # of the products of all ranks; known after the first step
        self.products: dict[str, Fp8Product] = {}
        self.cached_codes: dict[Fp8Product, Float8] | None = None

    @contextmanager
    def cache_weight_codes(self) -> Iterator[None]:
        """Inside, weights must not change: each is rounded once, and its codes are cached, a byte for each value."""
        self.cached_codes = {}
        try:
            yield
        finally:
            self.cached_codes = None

    @property
    def uses_current_scaling(self) -> bool:
        """Whether this is one of the first steps, in which scales follow each batch."""
        return self._randomness.step < self.settings.apply_online_actscale_step

    def end_step(self, *, skipped: bool = False) -> None:
        """Update the averages, unless the update was skipped. Experts that received no token keep theirs."""
        if not skipped:
            self._update_averages()
        for product in self.products.values():
            product.observed_amax = None

    def _update_averages(self) -> None:
        reached = [
            (path, product.observed_amax)
            for path, product in self.products.items()
            if product.observed_amax is not None
        ]
        values = paddle.stack([observed_amax for _, observed_amax in reached]).numpy().tolist() if reached else []
        own = {path: value for (path, _), value in zip(reached, values, strict=True)}
        if self._paths is None:
            self._paths = sorted({path for paths in self._all_gather_object(list(self.products)) for path in paths})
        figures = self._all_reduce_max(np.array([own.get(path, 0.0) for path in self._paths], np.float32))
        of_all = dict(zip(self._paths, figures.tolist(), strict=True))  # other ranks have other tokens or layers
        for path, product in self.products.items():
            largest = of_all[path]
            if 0 < largest < math.inf:
                product.end_step(largest)

    def averages(self) -> dict[str, Average]:
        """Return the averages of all ranks, for a checkpoint. All ranks must call this together."""
        return {
            path: average for part in self._all_gather_object(self.local_averages()) for path, average in part.items()
        }

    def local_averages(self) -> dict[str, Average]:
        """Return the averages of the layers on this rank that have seen a step."""
        return {path: (each.average, each.steps) for path, each in self.products.items() if each.steps}

    def restore(self, averages: Mapping[str, Average]) -> None:
        """Set the averages; ignore those of layers that are on other ranks."""
        for path in self.products.keys() & averages.keys():
            self.products[path].average, self.products[path].steps = averages[path]


def compute_in_fp8(
    linears: Mapping[str, Linear],
    settings: Fp8,
    randomness: Randomness,
    all_gather_object: AllGatherObject = single_process_all_gather,
    all_reduce_max: AllReduceMax = single_process_all_reduce_max,
) -> ActivationScales:
    """Give these linear layers, by path, FP8 products.

    Args:
        all_gather_object: over all ranks of the run.
        all_reduce_max: elementwise maximum over all ranks of the run.

    Raises:
        ConfigurationError: the Hadamard block size does not divide the inputs of a layer (all layers are listed).
    """
    if problem := rotation_problem(settings, {path: each.weight.shape[0] for path, each in linears.items()}):
        raise ConfigurationError(problem)
    scales = ActivationScales(settings, randomness, all_gather_object, all_reduce_max)
    for path, linear in linears.items():
        linear.product = scales.products[path] = Fp8Product(scales)
    return scales


def read_averages(folder: Path | str | None) -> dict[str, Average]:
    """Return the activation averages that were saved with a model; empty if it was not trained through FP8.

    Raises:
        ModelFileError: the file is damaged.
    """
    path = None if folder is None else Path(folder) / AVERAGES_FILE
    if path is None or not path.is_file():
        return {}
    stored = read_json_object(path)
    try:
        return {name: (float(average), int(steps)) for name, (average, steps) in stored.items()}
    except (TypeError, ValueError):
        raise ModelFileError(f"{path}: expected for each linear layer an average and a number of steps") from None


def write_averages(folder: Path, averages: Mapping[str, Average]) -> Path:
    """Write the averages into the model folder, ordered by name."""
    path = folder / AVERAGES_FILE
    path.write_text(json.dumps(averages, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return path


class _Product(PyLayer):
    """See the module docstring. Between forward and backward it keeps the codes, a byte for each activation."""

    @staticmethod
    def forward(ctx, x, weight, product, linear):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad = _, wants_weight = needs_grad(x, weight)
        ctx.product, ctx.linear = product, linear
        rotated = hadamard_rotate(x, product.shared.settings.hadamard_block)
        left = encode(rotated, FORWARD_FORMAT, product.activation_amax(rotated, linear))
        if wants_weight:
            ctx.save_for_backward(*left)
        return multiply(left, product.weight_codes(linear), x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        settings, linear, (wants_x, wants_weight) = ctx.product.shared.settings, ctx.linear, ctx.needs_input_grad
        block, rounded = settings.hadamard_block, grad
        if (wants_x and settings.quant_input_grad) or (wants_weight and settings.quant_weight_grad):
            largest = linear.tp.maximum(amax(grad))
            rounded = encode(grad, settings.gradient_format, largest).decoded(grad.dtype)
        grad_x = grad_weight = None
        if wants_x:
            g = rounded if settings.quant_input_grad else grad
            grad_x = hadamard_rotate(paddle.matmul(g, ctx.product.weight_codes(linear).decoded(g.dtype)), block)
        if wants_weight:
            g = rounded if settings.quant_weight_grad else grad
            x = hadamard_rotate(Float8(*ctx.saved_tensor()).decoded(g.dtype), block)
            grad_weight = paddle.matmul(_rows(x), _rows(g), transpose_x=True).astype(linear.weight.dtype)
        return filter_gradients((grad_x, grad_weight), ctx.needs_input_grad)


def multiply(left: Float8, right: Float8, dtype: paddle.dtype) -> paddle.Tensor:
    """Compute left right^T [..., out] of e4m3 left [..., in] and right [out, in], with the device's FP8 product if
    possible."""
    if dtype in HALF and has_fp8_products() and _is_fit_for_the_device(left.codes, right.codes):
        name = str(dtype).removeprefix("paddle.")
        product = paddle.linalg.fp8_fp8_half_gemm_fused(
            _rows(left.codes), right.codes, transpose_y=True, scale=_GEMM_SCALE, output_dtype=name
        )
        scaled = product.astype("float32") * (left.scale * right.scale / _GEMM_SCALE)
        return scaled.astype(dtype).reshape([*left.codes.shape[:-1], -1])
    return paddle.matmul(left.decoded(dtype), right.decoded(dtype), transpose_y=True)


def _is_fit_for_the_device(left: paddle.Tensor, right: paddle.Tensor) -> bool:
    """Return whether the device's product supports the shapes: it needs rows, and sides of multiples of 16 bytes."""
    return left.size > 0 and all(side % 16 == 0 for side in right.shape)


def _rows(x: paddle.Tensor) -> paddle.Tensor:
    return x.reshape([math.prod(x.shape[:-1]), x.shape[-1]])  # no -1, because there may be no rows
