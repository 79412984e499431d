"""DAC, the Descript Audio Codec (https://arxiv.org/abs/2306.06546), at 16, 24 and 44.1 kHz.

Convolutions with snake activations, neither causal nor with a state, around a residual quantizer that looks codes up
by direction in a projection of few dimensions (factorized, L2-normalised codes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs import dac_layers
from erniekit.codecs.checks import check_codes, check_levels, check_recording
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.convolutions import Conv1D
from erniekit.codecs.stack import Layer, pieces_of, through_in_pieces
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPE = "dac"
PIECE_SECONDS = 1  # of sound that go through the convolutions at once
NORM_EPSILON = 1e-12  # the least length that a direction is divided by
_UNUSED_LEVELS = r"quantizer\.quantizers\.\d+\..*"


@dataclass(frozen=True)
class DacConfig:
    """What tells one DAC from another, as `config.json` calls it."""

    encoder_hidden_size: int
    decoder_hidden_size: int
    downsampling_ratios: tuple[int, ...]
    n_codebooks: int
    codebook_size: int
    codebook_dim: int
    sampling_rate: int

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> DacConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of a DAC.
        """
        read = config_reader(path, config)
        values = cls(
            encoder_hidden_size=read("encoder_hidden_size", 64),
            decoder_hidden_size=read("decoder_hidden_size", 1536),
            downsampling_ratios=read("downsampling_ratios", (2, 4, 8, 8)),
            n_codebooks=read("n_codebooks", 9),
            codebook_size=read("codebook_size", 1024),
            codebook_dim=read("codebook_dim", 8),
            sampling_rate=read("sampling_rate", 16_000),
        )
        # transformers computes both from the other values, whatever the file says.
        for key, expected in (
            ("hidden_size", values.hidden_size),
            ("upsampling_ratios", list(values.downsampling_ratios[::-1])),
        ):
            if config.get(key, expected) != expected:
                raise ModelFileError(f"{path}: {key}: {config[key]!r}: expected {expected}, as other values say")
        return values

    @property
    def hidden_size(self) -> int:
        return self.encoder_hidden_size * 2 ** len(self.downsampling_ratios)

    @property
    def hop_length(self) -> int:
        """Samples of a frame."""
        return math.prod(self.downsampling_ratios)


class Dac:
    """A DAC as a codec; see `erniekit.codecs.codec.Codec`.

    A recording is followed by zeros up to whole frames, as transformers' feature extractor does it, so S samples have
    ceil(S / hop_length) frames. Sound of codes is a few samples shorter than that where a ratio is odd.
    """

    can_decode = True

    def __init__(self, folder: Path | str, *, levels: int | None = None) -> None:
        """Open a model folder of transformers.

        Args:
            levels: use so many codebooks, from the coarsest. None: all.

        Raises:
            ModelFileError: a file is missing or does not fit.
            ConfigurationError: the codec has fewer levels.
        """
        folder = Path(folder)
        path = folder / "config.json"
        self.config = config = DacConfig.from_json(path, read_json_object(path))
        self.levels = check_levels(levels, config.n_codebooks, folder)
        self.codebook_size = config.codebook_size
        self.sampling_rate = config.sampling_rate
        self.frame_rate = config.sampling_rate / config.hop_length
        self._piece = max(1, PIECE_SECONDS * config.sampling_rate // config.hop_length)  # frames
        weights = CodecWeights(folder)
        ratios, size = config.downsampling_ratios, config.hidden_size
        self._encoder = dac_layers.read_encoder(weights, "encoder", config.encoder_hidden_size, ratios, size)
        self._quantizers = [_read_quantizer(weights, config, level) for level in range(self.levels)]
        self.fingerprint = weights.fingerprint(MODEL_TYPE, asdict(config), self.levels)
        decoder = dac_layers.read_decoder(
            weights, "decoder", config.decoder_hidden_size, ratios[::-1], size, whole_frames=False
        )
        self._decoder = [*decoder, paddle.tanh]
        weights.refuse_others(_UNUSED_LEVELS)

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of float32[samples].

        Raises:
            DataError: there are no samples, or they are no sound.
        """
        sound = check_recording(sound)
        hop = self.config.hop_length
        with paddle.no_grad():
            pieces = pieces_of(sound[None], self._piece * hop, multiple=hop)
            codes = [self._quantize(x).numpy() for x in through_in_pieces(self._encoder, pieces, down=hop)]
        return np.concatenate(codes, 1).astype(np.int32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels or fewer, frames].

        Raises:
            DataError: a code is out of range, their shape is wrong, or there are no frames.
        """
        codes = check_codes(codes, self)
        if not codes.shape[1]:
            raise DataError("codes without frames have no sound")
        with paddle.no_grad():
            states = (self._dequantize(piece) for piece in pieces_of(codes, self._piece))
            pieces = through_in_pieces(self._decoder, states, up=self.config.hop_length)
            return np.concatenate([piece.numpy()[0, 0] for piece in pieces])

    def _quantize(self, x: Tensor) -> Tensor:
        """Return the codes int64[levels, frames] of states [1, hidden_size, frames]."""
        codes = []
        for quantizer in self._quantizers:
            found = quantizer.encode(x)
            x = x - quantizer.decode(found)
            codes.append(found)
        return paddle.stack(codes)

    def _dequantize(self, codes: Tensor) -> Tensor:
        """Return states [1, hidden_size, frames] of codes int64[1, levels, frames]."""
        parts = [quantizer.decode(level) for quantizer, level in zip(self._quantizers, codes[0], strict=False)]
        return sum(parts[1:], parts[0])


@dataclass(frozen=True)
class FactorizedQuantizer:
    """One level: its codes are looked up by direction between two projections.

    Attributes:
        project_in, project_out: convolutions with kernel 1, to [1, codebook_dim, T] and back.
        codebook: [codebook_size, codebook_dim].
    """

    project_in: Layer
    codebook: Tensor
    project_out: Layer

    def encode(self, x: Tensor) -> Tensor:
        """Return int64[T] of states [1, hidden_size, T]: the entry whose direction is nearest, the first of several."""
        wanted = F.normalize(self.project_in(x)[0], axis=0, epsilon=NORM_EPSILON)
        directions = F.normalize(self.codebook, axis=1, epsilon=NORM_EPSILON)
        # The squared length of a direction is 1 but for rounding, which decides between directions that are equal.
        return (2 * paddle.matmul(directions, wanted) + directions.square().sum(1, keepdim=True)).argmax(0)

    def decode(self, codes: Tensor) -> Tensor:
        """Return states [1, hidden_size, T] of codes int64[T]."""
        return self.project_out(self.codebook[codes].transpose([1, 0]).unsqueeze(0))


def _read_quantizer(weights: CodecWeights, config: DacConfig, level: int) -> FactorizedQuantizer:
    name, size, small = f"quantizer.quantizers.{level}", config.hidden_size, config.codebook_dim
    return FactorizedQuantizer(
        _projection(weights, f"{name}.in_proj", size, small),
        _tensor(weights, f"{name}.codebook.weight", config.codebook_size, small),
        _projection(weights, f"{name}.out_proj", small, size),
    )


def _projection(weights: CodecWeights, name: str, inputs: int, outputs: int) -> Layer:
    weight = _tensor(weights, f"{name}.weight", outputs, inputs, 1)
    return Conv1D(weight, _tensor(weights, f"{name}.bias", outputs))


def _tensor(weights: CodecWeights, name: str, *shape: int) -> Tensor:
    return paddle.to_tensor(weights.take(name, *shape))
