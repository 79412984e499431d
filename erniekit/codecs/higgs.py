"""The tokenizer of Higgs Audio v2: DAC's convolutions and a HuBERT, quantized together, at 25 Hz.

The acoustic branch is an encoder of DAC over the sound; the semantic branch is the mean of all hidden states of a
speech model over the same sound at another rate, behind a few convolutions. One residual quantizer takes both; DAC's
decoder gives the sound back. Sound and states are [1, channels, time]. Names of weights and of `config.json` are those
of `HiggsAudioV2TokenizerModel` in transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from erniekit.codecs import dac_layers
from erniekit.codecs.checks import check_codes, check_levels, check_recording
from erniekit.codecs.codebooks import nearest
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.convolutions import Conv1D
from erniekit.codecs.hubert import MODEL_TYPES, SpeechModelConfig, hidden_states
from erniekit.codecs.resampling import resample
from erniekit.codecs.stack import PIECE_SECONDS, Layer, Residual, pieces_of, through, through_in_pieces
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPE = "higgs_audio_v2_tokenizer"
# What training needed: a second decoder, and more of the quantizer, which may have levels that are not used, too.
_UNUSED = r"(quantizer|decoder_semantic|fc1)\..*|semantic_model\.masked_spec_embed"
SEMANTIC_PADDING = 160  # samples of silence on either side of what the speech model gets


@dataclass(frozen=True)
class HiggsConfig:
    """What tells one of these tokenizers from another, as `config.json` calls it; `dac` is `acoustic_model_config`."""

    sample_rate: int
    semantic_sample_rate: int
    downsample_factor: int
    kernel_size: int
    unit_kernel_size: int
    channel_ratios: tuple[float, ...]
    strides: tuple[int, ...]
    block_dilations: tuple[int, ...]
    codebook_size: int
    codebook_dim: int
    target_bandwidths: tuple[float, ...]
    dac_encoder_hidden_size: int
    dac_downsampling_ratios: tuple[int, ...]
    dac_decoder_hidden_size: int
    dac_upsampling_ratios: tuple[int, ...]
    dac_hidden_size: int
    semantic: SpeechModelConfig

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> HiggsConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of this tokenizer.
        """
        read = config_reader(path, config)
        acoustic, semantic = (_nested(path, config, key) for key in ("acoustic_model_config", "semantic_model_config"))
        of_dac = config_reader(path, acoustic)
        if acoustic.get("model_type", "dac") != "dac" or semantic.get("model_type", "hubert") not in MODEL_TYPES:
            raise ModelFileError(f"{path}: supported are dac as acoustic_model_config and {', '.join(MODEL_TYPES)}"
                                 " as semantic_model_config")  # fmt: skip
        sizes = cls(
            sample_rate=read("sample_rate", 24_000),
            semantic_sample_rate=read("semantic_sample_rate", 16_000),
            downsample_factor=read("downsample_factor", 320),
            kernel_size=read("kernel_size", 3),
            unit_kernel_size=read("unit_kernel_size", 3),
            channel_ratios=read("channel_ratios", (1.0, 1.0)),
            strides=read("strides", (1, 1)),
            block_dilations=read("block_dilations", (1, 1)),
            codebook_size=read("codebook_size", 1024),
            codebook_dim=read("codebook_dim", 64),
            target_bandwidths=read("target_bandwidths", (0.5, 1.0, 1.5, 2.0, 4.0)),
            dac_encoder_hidden_size=of_dac("encoder_hidden_size", 64),
            dac_downsampling_ratios=of_dac("downsampling_ratios", (8, 5, 4, 2)),
            dac_decoder_hidden_size=of_dac("decoder_hidden_size", 1024),
            dac_upsampling_ratios=of_dac("upsampling_ratios", (8, 5, 4, 2)),
            dac_hidden_size=of_dac("hidden_size", 256),
            semantic=SpeechModelConfig.from_json(path, semantic),
        )
        sizes._check(path)
        return sizes

    def _check(self, path: Path) -> None:
        if len(self.strides) != len(self.channel_ratios):
            raise ModelFileError(f"{path}: strides and channel_ratios have different lengths")
        if self.semantic.do_stable_layer_norm:
            raise ModelFileError(f"{path}: semantic_model_config: do_stable_layer_norm is not supported")
        if self.dac_decoder_hidden_size % 2 ** len(self.dac_upsampling_ratios):
            raise ModelFileError(f"{path}: upsampling_ratios cannot halve decoder_hidden_size so many times")
        if self.codebook_size < 2 or self.levels < 1:
            raise ModelFileError(
                f"{path}: codebook_size, target_bandwidths: {self.target_bandwidths[-1]} kbit/s are less than a "
                f"level of {self.codebook_size} codes"
            )

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return math.prod(self.dac_downsampling_ratios)

    @property
    def hidden_size(self) -> int:
        return self.dac_hidden_size + self.semantic.hidden_size

    @property
    def levels(self) -> int:
        """Levels that the largest bandwidth has room for; the rate of frames is rounded up."""
        frame_rate, bandwidth = math.ceil(self.sample_rate / self.hop), self.target_bandwidths[-1]
        codebooks = int(1000 * bandwidth // (frame_rate * math.ceil(math.log2(self.codebook_size))))
        used = math.floor(bandwidth / (math.log2(self.codebook_size) * frame_rate / 1000))
        return min(codebooks, max(1, used))

    @property
    def semantic_step(self) -> int:
        """Every so many states of the speech model, one is taken."""
        return max(1, int(self.hop / (self.sample_rate / self.semantic_sample_rate) / self.downsample_factor))


class Higgs:
    """A tokenizer of Higgs Audio v2 as a codec; see `erniekit.codecs.codec.Codec`.

    A recording is followed by zeros up to whole frames, as transformers' feature extractor does it, so S samples have
    ceil(S / hop) frames.
    """

    can_decode = True

    def __init__(self, folder: Path | str, *, levels: int | None = None) -> None:
        """Open a model folder of transformers 5.

        Args:
            levels: use so many codebooks, from the coarsest. None: all.

        Raises:
            ModelFileError: a file is missing or does not fit.
            ConfigurationError: the codec has fewer levels.
        """
        folder = Path(folder)
        path = folder / "config.json"
        config = self.config = HiggsConfig.from_json(path, read_json_object(path))
        self.levels = check_levels(levels, config.levels, folder)
        self.sampling_rate, self.frame_rate = config.sample_rate, config.sample_rate / config.hop
        self.codebook_size = config.codebook_size
        self._piece = max(1, PIECE_SECONDS * config.sample_rate // config.hop)  # frames
        weights = CodecWeights(folder)
        self._acoustic = dac_layers.read_encoder(
            weights,
            "acoustic_encoder",
            config.dac_encoder_hidden_size,
            config.dac_downsampling_ratios,
            config.dac_hidden_size,
        )
        shapes = config.semantic.weight_shapes(config.semantic.num_hidden_layers)
        self._speech_model = {name: _tensor(weights, f"semantic_model.{name}", *shape) for name, shape in shapes}
        self._semantic = _read_semantic_encoder(weights, config)
        self._fc = _Linear.read(weights, "fc", config.hidden_size, config.hidden_size)
        self._quantizers = [_Quantizer.read(weights, f"quantizer.quantizers.{n}", config) for n in range(self.levels)]
        self.fingerprint = weights.fingerprint(MODEL_TYPE, asdict(config), self.levels)  # nothing of the decoder
        self._fc2 = _Linear.read(weights, "fc2", config.hidden_size, config.dac_hidden_size)
        self._decoder = dac_layers.read_decoder(
            weights,
            "acoustic_decoder",
            config.dac_decoder_hidden_size,
            config.dac_upsampling_ratios,
            config.dac_hidden_size,
            whole_frames=True,
        )
        weights.refuse_others(_UNUSED)

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of float32[samples].

        Raises:
            DataError: there are no samples, they are no sound, or too few for the speech model.
        """
        sound = check_recording(sound)
        sound = np.pad(sound, (0, -len(sound) % self.config.hop))
        with paddle.no_grad():
            semantic_1CT = self._semantic_states(sound)
            acoustic_1CT = self._acoustic_states(sound, semantic_1CT.shape[2])
            x_TC = self._fc(paddle.concat([acoustic_1CT, semantic_1CT], 1)[0].transpose([1, 0]))
            codes = []
            for quantizer in self._quantizers:
                codes.append(quantizer.encode(x_TC))
                x_TC = x_TC - quantizer.decode(codes[-1])
            return paddle.stack(codes).numpy().astype(np.int32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels or fewer, frames].

        Raises:
            DataError: a code is out of range, their shape is wrong, or there are no frames.
        """
        codes = check_codes(codes, self)
        if not codes.shape[1]:
            raise DataError("codes without frames have no sound")
        with paddle.no_grad():
            states = (self._states_of(codes_1LT[0]) for codes_1LT in pieces_of(codes, self._piece))
            pieces = through_in_pieces(self._decoder, states, up=math.prod(self.config.dac_upsampling_ratios))
            return np.concatenate([piece.numpy()[0, 0] for piece in pieces])

    def _states_of(self, codes_LT: Tensor) -> Tensor:
        """Return the states [1, C, T] that the decoder makes sound of."""
        pairs = zip(self._quantizers, codes_LT, strict=False)
        x_TC = self._fc2(paddle.add_n([quantizer.decode(codes_T) for quantizer, codes_T in pairs]))
        return x_TC.transpose([1, 0]).unsqueeze(0)

    def _semantic_states(self, sound: np.ndarray) -> Tensor:
        """Return the mean of all hidden states, behind the convolutions."""
        config = self.config
        silence = np.zeros(SEMANTIC_PADDING, np.float32)
        heard = np.concatenate([silence, resample(sound, config.sample_rate, config.semantic_sample_rate), silence])
        if len(heard) < config.semantic.receptive_field():
            raise DataError(f"a recording of {len(sound)} samples is too short for the speech model of this codec")
        states = hidden_states(config.semantic, self._speech_model, paddle.to_tensor(heard))
        mean_TC = reduce(paddle.add, states) / (config.semantic.num_hidden_layers + 1)
        return through(self._semantic, mean_TC[:: config.semantic_step].transpose([1, 0]).unsqueeze(0))

    def _acoustic_states(self, sound: np.ndarray, frames: int) -> Tensor:
        """Return as many states of the sound as the semantic branch has; half a frame of silence on either side makes
        up for one that is missing."""
        padded = sound
        if dac_layers.frames(len(sound), self.config.dac_downsampling_ratios) != frames:
            padded = np.pad(sound, self.config.hop // 2)
        if (acoustic := dac_layers.frames(len(padded), self.config.dac_downsampling_ratios)) != frames:
            raise DataError(f"a recording of {len(sound)} samples has {acoustic} acoustic and {frames} semantic frames")
        pieces = pieces_of(padded[None], self._piece * self.config.hop)
        return paddle.concat(list(through_in_pieces(self._acoustic, pieces, down=self.config.hop)), 2)


@dataclass(frozen=True)
class _Linear:
    """y = x W' + b over the last dimension, W [out, in]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def read(cls, weights: CodecWeights, path: str, inputs: int, outputs: int) -> _Linear:
        return cls(_tensor(weights, f"{path}.weight", outputs, inputs), _tensor(weights, f"{path}.bias", outputs))

    def __call__(self, x: Tensor) -> Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True) + self.bias


@dataclass(frozen=True)
class _Quantizer:
    """One level, in a space of its own."""

    project_in: _Linear
    codebook: Tensor  # [codebook_size, codebook_dim]
    project_out: _Linear

    @classmethod
    def read(cls, weights: CodecWeights, path: str, config: HiggsConfig) -> _Quantizer:
        return cls(
            _Linear.read(weights, f"{path}.project_in", config.hidden_size, config.codebook_dim),
            _tensor(weights, f"{path}.codebook.embed", config.codebook_size, config.codebook_dim),
            _Linear.read(weights, f"{path}.project_out", config.codebook_dim, config.hidden_size),
        )

    def encode(self, x_TC: Tensor) -> Tensor:
        return nearest(self.project_in(x_TC), self.codebook)

    def decode(self, codes_T: Tensor) -> Tensor:
        return self.project_out(self.codebook[codes_T])


def _read_semantic_encoder(weights: CodecWeights, config: HiggsConfig) -> Sequence[Layer]:
    """Read the convolutions behind the speech model; the size of states in between is `channel_ratios` times its."""
    first = channels = config.semantic.hidden_size
    kernel = config.kernel_size
    layers: list[Layer] = [_convolution(weights, "encoder_semantic.conv", first, first, kernel, kernel // 2)]
    for block, (stride, ratio) in enumerate(zip(config.strides, config.channel_ratios, strict=True)):
        path = f"encoder_semantic.conv_blocks.{block}"
        for unit, dilation in enumerate(config.block_dilations):
            at, padding = f"{path}.res_units.{unit}", (config.unit_kernel_size - 1) // 2 * dilation
            inner = _convolution(
                weights, f"{at}.conv1", channels, channels, config.unit_kernel_size, padding, dilation=dilation
            )
            outer = _convolution(weights, f"{at}.conv2", channels, channels, 1, 0)
            layers.append(Residual([F.elu, inner, F.elu, outer]))
        kernel = 3 if stride == 1 else 2 * stride
        outputs = int(first * ratio)
        layers.append(
            _convolution(
                weights, f"{path}.conv", channels, outputs, kernel, (kernel - 1) // 2, stride=stride, bias=True
            )
        )
        channels = outputs
    return layers


def _convolution(
    weights: CodecWeights,
    path: str,
    inputs: int,
    outputs: int,
    kernel: int,
    padding: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    bias: bool = False,
) -> Layer:
    weight = _tensor(weights, f"{path}.weight", outputs, inputs, kernel)
    bias_C = _tensor(weights, f"{path}.bias", outputs) if bias else None
    return Conv1D(weight, bias_C, stride, dilation, left=padding, right=padding)


def _tensor(weights: CodecWeights, name: str, *shape: int) -> Tensor:
    return paddle.to_tensor(weights.take(name, *shape))


def _nested(path: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelFileError(f"{path}: {key}: expected an object, got {value!r:.80}")
    return value or {}
