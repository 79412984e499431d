"""The linear layer of every projection, x W + b, with slots for an adapter and a custom product."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import paddle
from paddle import nn

from erniekit.model.cpu_gradients import add_bias, linear
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

ZEROS = nn.initializer.Constant(0.0)  # the builder always sets the weights; drawing random ones here would be wasted


class Adapter(Protocol):
    """An adapter on top of the weight of a `Linear`; returns the new output."""

    def __call__(self, x: paddle.Tensor, output: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...


class Product(Protocol):
    """Computes x W of a `Linear` in another way: with a quantized weight, or through FP8."""

    def __call__(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...

    def dense(self) -> paddle.Tensor:
        """Return a new dense copy [out, in] of the weight; called only if the layer has no weight parameter."""
        ...


class Linear(nn.Layer):
    """x [..., in] -> x W + b [..., out] with W [in, out], then modified by the adapter if there is one.

    Parameters are named `weight` and `bias`; those of an adapter begin with `adapter.`. If `product` holds a quantized
    weight, `weight` is None.

    Args:
        tp: the tensor-parallel group that shards the weight.
        shard_along: the sharded axis. With "outputs" (column parallel) x comes from `copy_to_tp` and the output is
            this rank's shard; with "inputs" (row parallel) x is this rank's shard and the output is summed by
            `reduce_from_tp`.
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
        )  # the output is summed over the ranks, and the bias is added once, after the sum
        if shard_along == "inputs":
            inputs = tp.local_size(inputs)
        elif shard_along == "outputs":
            outputs = tp.local_size(outputs)
        self.weight: Any = self.create_parameter([inputs, outputs], default_initializer=ZEROS)
        self.bias = self.create_parameter([outputs], default_initializer=ZEROS, is_bias=True) if bias else None
        self.product: Any = None  # a `Product`; None: a plain product
        self.adapter: nn.Layer | None = None

    @property
    def dense_weight(self) -> paddle.Tensor:
        """W [in, out]: the parameter, or a new dense copy of a quantized weight."""
        return self.product.dense().t() if self.weight is None else self.weight

    def set_dense_weight(self, values: paddle.Tensor) -> None:
        """Replace the weight by this W [in, out]."""
        if self.weight is None:
            self.product = None
            self.weight = self.create_parameter(values.shape, dtype=values.dtype, default_initializer=ZEROS)
        self.weight.set_value(values)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        bias = None if self.is_row_parallel else self.bias
        if self.product is None:
            output = linear(x, self.weight, bias)
        else:
            output = self.product(x, self)
            output = output if bias is None else add_bias(output, bias)
        if self.adapter is not None:
            output = self.adapter(x, output, self)
        if self.is_row_parallel:
            output = self.tp.reduce_from_tp(output)
            if self.bias is not None:
                output = add_bias(output, self.bias)
        return output
