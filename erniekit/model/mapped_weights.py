"""Weights that stay in their files, mapped into memory: of models that compute and are not trained.

A mapped weight is read when a product reads it, so that a model is there at once, and processes that answer with the
same files share their memory. Matrices stay [out, in] as the files have them. Those in bfloat16 stay so, too, where
kernels of our own compute with them: they are half of the memory, and half of what a step of decoding reads; products
and sums are in float32. The mappings are private: what is written to a weight never reaches its file. A file must not
be overwritten in place meanwhile; saving renames.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model import native
from erniekit.model.decoder import Decoder, Embedding, Head
from erniekit.model.linear import Linear
from erniekit.model.parameter_memory import host_array
from erniekit.model.storage.matrix_reading import StoredMatrix, read_matrix
from erniekit.model.vocabulary import vocabulary_weights
from erniekit.native.linear import BF16, OUTPUTS_FIRST, LinearWeight, can_multiply, product

_ARRAYS: dict[str, Any] = {"F32": np.float32, "BF16": np.int16}


class Matrices(Protocol):
    """Where the weights of a folder lie in its files; see `storage.layouts.StoredWeights`."""

    def matrix(self, name: str) -> StoredMatrix | None: ...

    def is_transposed(self, name: str) -> bool: ...


class MappedWeight(nn.Layer):
    """Stands for the weight of a linear layer, an embedding or a head: float32 or bfloat16 [out, in], as files have it;
    no parameter."""

    def __init__(self, weight: paddle.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistable=False)

    def forward(self, x: paddle.Tensor, linear: Linear | None = None) -> paddle.Tensor:
        """Compute x W, float32 [..., in] -> [..., out]."""
        if self.weight.dtype == x.dtype:
            return paddle.matmul(x, self.weight, transpose_y=True)
        x = native.contiguous(x)
        if not native.computes(x) or (paddle.is_grad_enabled() and not x.stop_gradient):
            return paddle.matmul(x, self.dense(), transpose_y=True)
        y = paddle.empty([*x.shape[:-1], self.weight.shape[0]], x.dtype)
        product(self.described(), native.size(x) // x.shape[-1], x.data_ptr(), y.data_ptr())
        return y

    def rows(self, ids: paddle.Tensor) -> paddle.Tensor:
        """Return float32 rows of an embedding: ids [...] -> [..., in]."""
        return F.embedding(ids, self.weight).astype("float32")

    def described(self) -> LinearWeight:
        """Describe the weight for our C library; it has to outlive what is returned."""
        outputs, inputs = self.weight.shape
        form = BF16 if self.weight.dtype == paddle.bfloat16 else OUTPUTS_FIRST
        return LinearWeight(form, inputs, outputs, self.weight.data_ptr())

    def dense(self) -> paddle.Tensor:
        """Return a float32 copy [out, in]."""
        return self.weight.clone() if self.weight.dtype == paddle.float32 else self.weight.astype("float32")


def rows_by_name(decoder: Decoder) -> dict[str, Any]:
    """Return the layers with a row for each token, an `Embedding` and perhaps a `Head`, by the name of their weight.

    Stages of a pipeline lack some, and a reward model has a score in the place of its head.
    """
    if decoder.config.architecture.codes is not None or decoder.config.vocabulary is not None:
        return {}
    names = vocabulary_weights(decoder.config)
    layers = dict(zip(names, (getattr(decoder, "embedding", None), getattr(decoder, "head", None)), strict=False))
    return {name: layer for name, layer in layers.items() if isinstance(layer, (Embedding, Head))}


def map_weights(
    stored: Matrices, parameters: dict[str, paddle.Tensor], linears: dict[str, Linear], decoder: Decoder
) -> set[str]:
    """Let matrices stay in their files, or in the order of their files; return their names.

    Args:
        parameters: the decoder's, without memory, by Hugging Face name.
        linears: its linear layers, by path.

    Those of few bits, those that ranks divide, and those that have been grown or joined are none of them.
    """
    if paddle.get_device() != "cpu" or decoder.tp.size > 1:
        return set()
    mapped = set()
    owners: dict[str, Any] = {f"{path}.weight": linear for path, linear in linears.items()} | rows_by_name(decoder)
    for name, parameter in parameters.items():
        owner = owners.get(name)
        if owner is None or owner.weight is None or parameter.dtype != paddle.float32:
            continue
        matrix = stored.matrix(name)
        if matrix is None or stored.is_transposed(name):
            continue
        values = _mapped(matrix)
        if values is None and isinstance(owner, Linear):
            values = _widened(matrix)
        if values is None:
            continue
        if isinstance(owner, Linear):
            owner.product = MappedWeight(values)
        else:
            owner.mapped = MappedWeight(values)
        owner.weight = None
        mapped.add(name)
    return mapped


def _mapped(matrix: StoredMatrix) -> paddle.Tensor | None:
    """Return a matrix of a file as a tensor that shares its memory; None: it is stored in another way."""
    kind = _ARRAYS.get(matrix.dtype)
    if kind is None or matrix.stride != matrix.columns or matrix.offset % kind().itemsize:
        return None
    if matrix.dtype == "BF16" and not can_multiply():
        return None
    try:
        values = np.memmap(matrix.path, kind, "c", matrix.offset, (matrix.rows, matrix.columns))
    except (OSError, ValueError):  # a file system that maps nothing, or a file that has become shorter
        return None
    tensor = paddle.utils.dlpack.from_dlpack(np.asarray(values))
    return tensor.view("bfloat16") if matrix.dtype == "BF16" else tensor


def _widened(matrix: StoredMatrix) -> paddle.Tensor | None:
    """Return a matrix of 16 bits as float32; None: it cannot be read at once, see `read_matrix`."""
    values = paddle.empty([matrix.rows, matrix.columns])
    host = host_array(values)
    return values if host is not None and read_matrix(matrix, host, transposed=False) else None
