"""The linear layer of every projection: x W + b, with room for a low-rank adapter beside the weight."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, Protocol

import numpy as np
import paddle
from paddle import nn

from erniekit.model import kernels
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

ZEROS = nn.initializer.Constant(0.0)  # weights are always set by the builder; drawing random ones here is wasted


class Adapter(Protocol):
    """What may sit beside the weight of a `Linear`."""

    def __call__(self, x: paddle.Tensor, output: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...


class Product(Protocol):
    """How a `Linear` computes x W where it is no plain product: with a weight in few bits, or through FP8."""

    def __call__(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...

    def dense(self) -> paddle.Tensor:
        """The weight [out, in] that is computed with, made now; asked where the layer has none of its own."""
        ...


class Linear(nn.Layer):
    """x [..., in] -> x W + b [..., out], W [in, out]. With an adapter, what the adapter makes of that.

    Parameters are named `weight` and `bias`; those of an adapter begin with `adapter.`. Where `product` keeps the
    weight in few bits, `weight` is None.

    Args:
        tp: the ranks that divide it.
        shard_along: which axis they divide. With "outputs" x must have entered the block and the output is this
        rank's slice;
            with "inputs" x is this rank's slice and the output has left the block.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
        shard_along: Literal["inputs", "outputs"] | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.is_row_parallel = (
            tp.size > 1 and shard_along == "inputs"
        )  # over the ranks; the bias is added once, after it
        if shard_along == "inputs":
            inputs = tp.local_size(inputs)
        elif shard_along == "outputs":
            outputs = tp.local_size(outputs)
        self.weight: Any = self.create_parameter([inputs, outputs], default_initializer=ZEROS)
        self.bias = self.create_parameter([outputs], default_initializer=ZEROS, is_bias=True) if bias else None
        self.product: Any = None  # a layer that is a `Product`; None: plain
        self.adapter: nn.Layer | None = None

    @property
    def dense_weight(self) -> paddle.Tensor:
        """W [in, out]: the parameter, or, where it is kept in few bits, a copy that is made now."""
        return self.product.dense().t() if self.weight is None else self.weight

    def set_dense_weight(self, values: paddle.Tensor) -> None:
        """Compute with this W [in, out] from now on."""
        if self.weight is None:
            self.product = None
            self.weight = self.create_parameter(values.shape, dtype=values.dtype, default_initializer=ZEROS)
        self.weight.set_value(values)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        bias = None if self.is_row_parallel else self.bias
        if self.product is None:
            output = kernels.linear(x, self.weight, bias)
        else:
            output = self.product(x, self)
            output = output if bias is None else output + bias
        if self.adapter is not None:
            output = self.adapter(x, output, self)
        if self.is_row_parallel:
            output = self.tp.reduce_from_tp(output)
            if self.bias is not None:
                output = output + self.bias
        return output


# Random weights, each seeded by the run's seed and its own name, so that no order of construction matters. Needs no
# Paddle.


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> np.ndarray:
    """The initial value of the weight with this Hugging Face name and shape, float32."""
    if name.endswith("bias"):  # a router's correction bias, too
        return np.zeros(shape, np.float32)
    constant = config.architecture.weight_info(name).rule.initial
    if constant is not None:
        return np.full(shape, constant, np.float32)
    digest = hashlib.sha256(name.encode()).digest()
    generator = np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest[:8], "little")]))
    values = generator.standard_normal(shape, np.float32)
    return np.multiply(values, np.float32(config.initializer_range), out=values)
