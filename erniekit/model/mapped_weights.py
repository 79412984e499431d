"""Weights that stay in their files, mapped into memory: of models that compute and are not trained.

A mapped weight is read when a product reads it, so that a model is there at once, and processes that answer with the
same files share their memory. Linear weights stay [out, in] as the files have them; those of 16 bits are widened, and
not turned. The mappings are private: what is written to a weight never reaches its file. A file must not be overwritten
in place meanwhile; saving renames.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import paddle
from paddle import nn

from erniekit.model.decoder import Decoder
from erniekit.model.linear import Linear
from erniekit.model.parameter_memory import host_array
from erniekit.model.storage.matrix_reading import StoredMatrix, read_matrix


class Matrices(Protocol):
    """Where the weights of a folder lie in its files; see `storage.layouts.StoredWeights`."""

    def matrix(self, name: str) -> StoredMatrix | None: ...

    def is_transposed(self, name: str) -> bool: ...


class MappedWeight(nn.Layer):
    """Replaces `Linear.weight`: float32 [out, in], the order of files; no parameter."""

    def __init__(self, weight: paddle.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistable=False)

    def forward(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        """Compute x W, [..., in] -> [..., out]."""
        return paddle.matmul(x, self.weight, transpose_y=True)

    def dense(self) -> paddle.Tensor:
        """Return a copy [out, in]."""
        return self.weight.clone()


def map_weights(
    stored: Matrices, parameters: dict[str, paddle.Tensor], linears: dict[str, Linear], decoder: Decoder
) -> set[str]:
    """Let weights stay in their files, or in the order of their files; return their names.

    Args:
        parameters: the decoder's, without memory, by Hugging Face name.
        linears: its linear layers, by path.

    Those of few bits, those that ranks divide, and those that have been grown or joined are none of them.
    """
    if paddle.get_device() != "cpu" or decoder.tp.size > 1:
        return set()
    mapped = set()
    for name, parameter in parameters.items():
        matrix = stored.matrix(name) if len(parameter.shape) == 2 and parameter.dtype == paddle.float32 else None
        linear = linears.get(name.removesuffix(".weight"))
        is_linear = decoder.config.architecture.is_linear(name)
        if matrix is None or stored.is_transposed(name) or (is_linear and (linear is None or linear.weight is None)):
            continue
        values = _mapped(matrix) if matrix.dtype == "F32" else _widened(matrix) if is_linear else None
        if values is None:
            continue
        if is_linear:
            assert linear is not None
            linear.product, linear.weight = MappedWeight(values), None
        else:
            values._share_underline_tensor_to(parameter)
            parameter._init_func = None
        mapped.add(name)
    return mapped


def _mapped(matrix: StoredMatrix) -> paddle.Tensor | None:
    """Return a matrix of a file as a tensor that shares its memory; None: it is stored in another way."""
    if matrix.stride != matrix.columns or matrix.offset % 4:
        return None
    try:
        values = np.memmap(matrix.path, np.dtype("<f4"), "c", matrix.offset, (matrix.rows, matrix.columns))
    except (OSError, ValueError):  # a file system that maps nothing, or a file that has become shorter
        return None
    return paddle.utils.dlpack.from_dlpack(np.asarray(values))


def _widened(matrix: StoredMatrix) -> paddle.Tensor | None:
    """Return a matrix of 16 bits as float32; None: it cannot be read at once, see `read_matrix`."""
    values = paddle.empty([matrix.rows, matrix.columns])
    host = host_array(values)
    return values if host is not None and read_matrix(matrix, host, transposed=False) else None
