"""Training through 8-bit floats: what a linear layer multiplies is rounded to e4m3, gradients pass straight through.

    y = Q(x H) Q(W^T H)^T        dx = g Q(W^T H) H        dW = (Q(x H) H)^T g

with g = dy, or dy in 8 bits. H, block-diagonal and Hadamard's, is symmetric and orthogonal, so it cancels in the
product: it only spreads outliers before rounding. Everything has one scale for the whole tensor. That of a weight or a
gradient is of its own largest value; that of activations of the batch's largest for a while, and of a moving average
afterwards.
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
HALF = (paddle.float16, paddle.bfloat16)  # what the device's product gives
_GEMM_SCALE = 2.0**-18  # by which it is multiplied: two codes alone make 2^17.6, and float16 ends at 2^16
AVERAGES_FILE = "activation_scales.json"
Average = tuple[float, int]  # of the largest absolute activation of a step, and over how many steps
AllReduceMax = Callable[[np.ndarray], np.ndarray]  # this rank's figures -> the largest of all ranks, each by itself


def single_process_all_reduce_max(figures: np.ndarray) -> np.ndarray:
    """That of a process that is alone."""
    return figures


class Fp8Product(nn.Layer):
    """The slot `Linear.product`. The weight stays the linear layer's own, in full precision, and is what is trained."""

    def __init__(self, shared: ActivationScales) -> None:
        super().__init__()
        self.shared = shared
        self.average, self.steps = 0.0, 0
        self.observed_amax: paddle.Tensor | None = None  # the largest absolute activation of this step so far

    def forward(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        return apply(_Product, autocast_operand(x), linear.weight, self, linear)

    def activation_amax(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        """The value that the scale of rotated activations follows from, 0-d. A recomputed layer observes it again."""
        if not self.training and self.steps:
            return paddle.to_tensor(self.average)
        largest = amax(x)
        if linear.is_row_parallel:  # this rank has a slice of the channels
            largest = linear.tp.maximum(largest)
        if self.training:
            self.observed_amax = largest if self.observed_amax is None else paddle.maximum(self.observed_amax, largest)
            if self.steps and not self.shared.uses_current_scaling:
                return paddle.to_tensor(self.average)
        return largest

    def weight_codes(self, linear: Linear) -> Float8:
        """The rotated weight [out, in] in 8 bits; ranks that have slices of it share the scale of the whole."""
        kept = self.shared.cached_codes
        if kept is not None and self in kept:
            return kept[self]
        rotated = hadamard_rotate(linear.weight.t(), self.shared.settings.hadamard_block)
        codes = encode(rotated, FORWARD_FORMAT, linear.tp.maximum(amax(rotated)))
        if kept is not None:
            kept[self] = codes
        return codes

    def end_step(self, observed_amax: float) -> None:
        """Take the largest activation of a step, over all micro-batches and ranks, into the average."""
        weight = max(self.shared.settings.actscale_moving_rate, 1 / (self.steps + 1))
        self.average += weight * (observed_amax - self.average)
        self.steps += 1


class ActivationScales:
    """What the FP8 products of a decoder share; the loop ends each step with `end_step`.

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
        """Inside, weights do not change: each is rounded once, and its codes are kept, a byte for each value."""
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
        """Move the averages on, but not by a step whose update was skipped. Experts that no token has reached keep
        theirs."""
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
        of_all = dict(zip(self._paths, figures.tolist(), strict=True))  # other ranks have other tokens, or layers
        for path, product in self.products.items():
            largest = of_all[path]
            if 0 < largest < math.inf:
                product.end_step(largest)

    def averages(self) -> dict[str, Average]:
        """What a checkpoint keeps, of all ranks, for the layers that have seen a step. All ranks call it together."""
        return {
            path: average for part in self._all_gather_object(self.local_averages()) for path, average in part.items()
        }

    def local_averages(self) -> dict[str, Average]:
        """Those of the layers on this rank; the same on all ranks that have a layer."""
        return {path: (each.average, each.steps) for path, each in self.products.items() if each.steps}

    def restore(self, averages: Mapping[str, Average]) -> None:
        """The opposite; what belongs to layers that are not here is passed over."""
        for path in self.products.keys() & averages.keys():
            self.products[path].average, self.products[path].steps = averages[path]


def compute_in_fp8(
    linears: Mapping[str, Linear],
    settings: Fp8,
    randomness: Randomness,
    all_gather_object: AllGatherObject = single_process_all_gather,
    all_reduce_max: AllReduceMax = single_process_all_reduce_max,
) -> ActivationScales:
    """Give all these linear layers, by path, FP8 products.

    Args:
        all_gather_object: with all ranks of the run.
        maximum: of each figure over all ranks of the run.

    Raises:
        ConfigurationError: blocks of the Hadamard matrix do not divide the inputs of a layer (all listed).
    """
    if problem := rotation_problem(settings, {path: each.weight.shape[0] for path, each in linears.items()}):
        raise ConfigurationError(problem)
    scales = ActivationScales(settings, randomness, all_gather_object, all_reduce_max)
    for path, linear in linears.items():
        linear.product = scales.products[path] = Fp8Product(scales)
    return scales


def read_averages(folder: Path | str | None) -> dict[str, Average]:
    """The averages of activations that a model was saved with; none where it has not been trained through FP8.

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
    """Write them beside the weights, in the order of their names."""
    path = folder / AVERAGES_FILE
    path.write_text(json.dumps(averages, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return path


class _Product(PyLayer):
    """See the head of this file. Between forward and backward the codes are kept, a byte for each activation."""

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
    """left [..., in], right [out, in], both e4m3 -> left right^T [..., out], by the device's product where it fits."""
    if dtype in HALF and has_fp8_products() and _is_fit_for_the_device(left.codes, right.codes):
        name = str(dtype).removeprefix("paddle.")
        product = paddle.linalg.fp8_fp8_half_gemm_fused(
            _rows(left.codes), right.codes, transpose_y=True, scale=_GEMM_SCALE, output_dtype=name
        )
        scaled = product.astype("float32") * (left.scale * right.scale / _GEMM_SCALE)
        return scaled.astype(dtype).reshape([*left.codes.shape[:-1], -1])
    return paddle.matmul(left.decoded(dtype), right.decoded(dtype), transpose_y=True)


def _is_fit_for_the_device(left: paddle.Tensor, right: paddle.Tensor) -> bool:
    """Its product needs rows, and sides of whole 16 bytes."""
    return left.size > 0 and all(side % 16 == 0 for side in right.shape)


def _rows(x: paddle.Tensor) -> paddle.Tensor:
    return x.reshape([math.prod(x.shape[:-1]), x.shape[-1]])  # no -1, for there may be no rows
