"""Split residual vector quantization: Mimi's semantic level and acoustic levels (arXiv:2410.00037).

Two residual quantizers take the same states, each behind a projection of its own, so that acoustic levels do not refine
the semantic one; the sum of both is decoded. Names of weights and of `config.json` are those of transformers.
Shapes: T frames, C size of a state, D size of a vector, K entries of a codebook, L levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from erniekit.codecs.codebooks import dequantize, quantize
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import ModelFileError

USAGE_EPSILON = 1e-5  # the least that the sum of an entry's vectors is divided by
SEMANTIC, ACOUSTIC = (f"quantizer.{kind}_residual_vector_quantizer" for kind in ("semantic", "acoustic"))


@dataclass(frozen=True)
class SplitQuantizerSizes:
    """What `config.json` says of the quantizer, in its words."""

    hidden_size: int
    codebook_size: int
    codebook_dim: int
    num_quantizers: int
    num_semantic_quantizers: int

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any], hidden_size: int) -> SplitQuantizerSizes:
        """Read the sizes; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.
            hidden_size: of the states that are quantized.

        Raises:
            ModelFileError: values are of a wrong type, or do not fit each other.
        """
        read = config_reader(path, config)
        sizes = cls(
            hidden_size,
            codebook_size=read("codebook_size", 2048),
            codebook_dim=read("codebook_dim", 256),
            num_quantizers=read("num_quantizers", 32),
            num_semantic_quantizers=read("num_semantic_quantizers", 1),
        )
        if sizes.num_semantic_quantizers >= sizes.num_quantizers:
            raise ModelFileError(f"{path}: num_semantic_quantizers must be less than num_quantizers")
        if sizes.codebook_dim != read("vector_quantization_hidden_dimension", 256):
            raise ModelFileError(f"{path}: codebook_dim and vector_quantization_hidden_dimension differ")
        return sizes


@dataclass(frozen=True)
class ResidualQuantizer:
    """A residual quantizer between two projections, each [out, in], or None where sizes are equal."""

    project_in: Tensor | None
    codebooks: Sequence[Tensor]
    project_out: Tensor | None

    def encode(self, x_1CT: Tensor) -> Tensor:
        """Return int64[L, T]."""
        x_TC = x_1CT[0].transpose([1, 0])
        return quantize(_projected(x_TC, self.project_in), self.codebooks)

    def decode(self, codes_LT: Tensor) -> Tensor:
        """Return [1, C, T] of as many levels as there are codes."""
        x_TC = _projected(dequantize(codes_LT, self.codebooks), self.project_out)
        return x_TC.transpose([1, 0]).unsqueeze(0)


@dataclass(frozen=True)
class SplitQuantizer:
    """The quantizer of the semantic levels, and that of the acoustic ones; None: none of these are used."""

    semantic: ResidualQuantizer
    acoustic: ResidualQuantizer | None

    def encode(self, x_1CT: Tensor) -> Tensor:
        """Return the codes int64[L, T] of states, semantic levels first."""
        codes_LT = self.semantic.encode(x_1CT)
        return codes_LT if self.acoustic is None else paddle.concat([codes_LT, self.acoustic.encode(x_1CT)])

    def decode(self, codes_LT: Tensor) -> Tensor:
        """Return the states [1, C, T] of the codes of these levels, or of the first few."""
        split = len(self.semantic.codebooks)
        x_1CT = self.semantic.decode(codes_LT[:split])
        if self.acoustic is None or codes_LT.shape[0] <= split:
            return x_1CT
        return x_1CT + self.acoustic.decode(codes_LT[split:])


def read_split_quantizer(weights: CodecWeights, sizes: SplitQuantizerSizes, levels: int) -> SplitQuantizer:
    """Read the first levels of a quantizer.

    Raises:
        ModelFileError: a weight is missing or has another shape.
    """
    semantic = min(levels, sizes.num_semantic_quantizers)
    return SplitQuantizer(
        _read_quantizer(weights, sizes, SEMANTIC, semantic),
        _read_quantizer(weights, sizes, ACOUSTIC, levels - semantic) if levels > semantic else None,
    )


def _read_quantizer(weights: CodecWeights, sizes: SplitQuantizerSizes, path: str, levels: int) -> ResidualQuantizer:
    D, C = sizes.codebook_dim, sizes.hidden_size
    project_in = project_out = None
    if D != C:
        project_in = paddle.to_tensor(weights.take(f"{path}.input_proj.weight", D, C, 1)).squeeze(2)
        project_out = paddle.to_tensor(weights.take(f"{path}.output_proj.weight", C, D, 1)).squeeze(2)
    codebooks = [_read_codebook(weights, sizes, f"{path}.layers.{level}.codebook") for level in range(levels)]
    return ResidualQuantizer(project_in, codebooks, project_out)


def _read_codebook(weights: CodecWeights, sizes: SplitQuantizerSizes, path: str) -> Tensor:
    """Return the mean of the vectors that each entry stood for, of which files hold the sum and the count."""
    usage_K = weights.take(f"{path}.cluster_usage", sizes.codebook_size)
    sums_KD = weights.take(f"{path}.embed_sum", sizes.codebook_size, sizes.codebook_dim)
    return paddle.to_tensor(sums_KD / np.maximum(usage_K, np.float32(USAGE_EPSILON))[:, None])


def _projected(x_TC: Tensor, weight: Tensor | None) -> Tensor:
    return x_TC if weight is None else paddle.matmul(x_TC, weight, transpose_y=True)
