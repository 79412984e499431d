"""EnCodec (https://arxiv.org/abs/2210.13438): SEANet and residual vector quantization, at 24 kHz and at 48 kHz.

The model of 24 kHz is causal and has one channel. That of 48 kHz has two, takes chunks of a second that overlap by a
hundredth, each of which it scales to one loudness, and norms states over the time of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.codecs.checks import check_codes, check_levels, check_recording
from erniekit.codecs.codebooks import dequantize, quantize
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.seanet import SeanetSizes, read_decoder, read_encoder
from erniekit.codecs.stack import pieces_of
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPE = "encodec"
PIECE_SECONDS = 1  # of sound that go through the convolutions at once
LOUDNESS = 0.1  # root mean square of sound whose scales are not known
_TRAINING_STATE = r"quantizer\.layers\.\d+\.codebook\.(embed|embed_avg|cluster_size|inited)"


@dataclass(frozen=True)
class EncodecConfig:
    """What tells one EnCodec from another, as `config.json` calls it.

    Attributes:
        chunk_length: samples; None: a recording is one chunk.
        chunk_stride: samples from one chunk to the next; None as `chunk_length`.
        num_quantizers: levels that the weights have.
    """

    seanet: SeanetSizes
    sampling_rate: int
    normalize: bool
    chunk_length: int | None
    chunk_stride: int | None
    codebook_size: int
    target_bandwidths: tuple[float, ...]

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> EncodecConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of an EnCodec.
        """
        read = config_reader(path, config)
        sampling_rate = read("sampling_rate", 24_000)
        seconds, overlap = read("chunk_length_s", 0.0), read("overlap", 0.0)
        chunk_length = int(seconds * sampling_rate)
        values = cls(
            SeanetSizes(
                audio_channels=read("audio_channels", 1),
                hidden_size=read("hidden_size", 128),
                num_filters=read("num_filters", 32),
                num_residual_layers=read("num_residual_layers", 1),
                upsampling_ratios=read("upsampling_ratios", (8, 5, 4, 2)),
                norm_type=read("norm_type", "weight_norm"),
                kernel_size=read("kernel_size", 7),
                last_kernel_size=read("last_kernel_size", 7),
                residual_kernel_size=read("residual_kernel_size", 3),
                dilation_growth_rate=read("dilation_growth_rate", 2),
                use_causal_conv=read("use_causal_conv", True),
                pad_mode=read("pad_mode", "reflect"),
                compress=read("compress", 2),
                num_lstm_layers=read("num_lstm_layers", 2),
                trim_right_ratio=read("trim_right_ratio", 1.0),
                use_conv_shortcut=read("use_conv_shortcut", True),
            ),
            sampling_rate,
            read("normalize", False),
            chunk_length or None,
            max(1, int((1.0 - overlap) * chunk_length)) if chunk_length else None,
            read("codebook_size", 1024),
            read("target_bandwidths", (1.5, 3.0, 6.0, 12.0, 24.0)),
        )
        if problem := values._problem(config, overlap):
            raise ModelFileError(f"{path}: {problem}")
        return values

    @property
    def hop_length(self) -> int:
        """Samples of a frame."""
        return math.prod(self.seanet.upsampling_ratios)

    @property
    def chunk_frames(self) -> int | None:
        return self.chunk_length and math.ceil(self.chunk_length / self.hop_length)

    @property
    def frame_rate(self) -> float:
        """Frames for each second of a recording; those of chunks that overlap count twice where they do."""
        if self.chunk_frames and self.chunk_stride:
            return self.sampling_rate * self.chunk_frames / self.chunk_stride
        return self.sampling_rate / self.hop_length

    @property
    def num_quantizers(self) -> int:
        """The levels that the weights have: as many as the largest bandwidth asks for."""
        bits = math.ceil(math.log2(self.codebook_size))
        return int(1000 * self.target_bandwidths[-1] // (math.ceil(self.sampling_rate / self.hop_length) * bits))

    def levels_at(self, bandwidth: float) -> int:
        """Return the levels that fit into a bandwidth, kbit/s.

        Raises:
            ConfigurationError: the codec was not trained with it.
        """
        if bandwidth not in self.target_bandwidths:
            known = ", ".join(f"{value:g}" for value in self.target_bandwidths)
            raise ConfigurationError(f"a bandwidth of {bandwidth:g} kbit/s: this EnCodec has {known}")
        bits_per_second = math.log2(self.codebook_size) * math.ceil(self.sampling_rate / self.hop_length)
        return max(1, math.floor(1000 * bandwidth / bits_per_second))

    def _problem(self, config: Mapping[str, Any], overlap: float) -> str | None:
        sizes = self.seanet
        if sizes.norm_type not in ("weight_norm", "time_group_norm"):
            return f"norm_type: {sizes.norm_type!r} is none of weight_norm, time_group_norm"
        if sizes.pad_mode not in ("constant", "reflect", "replicate"):
            return f"pad_mode: {sizes.pad_mode!r} is none of constant, reflect, replicate"
        if sizes.audio_channels > 2:
            return f"audio_channels: {sizes.audio_channels} is neither 1 nor 2"
        if self.codebook_size < 2 or self.num_quantizers < 1:
            return "target_bandwidths: the largest leaves no level, with a frame rate and a codebook_size such as these"
        if (
            (self.chunk_length or 0) < 0
            or not 0 <= overlap < 1
            or (self.chunk_length and config.get("overlap") is None)
        ):
            return "chunk_length_s must not be negative, and comes with an overlap of at least 0 and less than 1"
        if sizes.trim_right_ratio > 1 or (sizes.trim_right_ratio != 1 and not sizes.use_causal_conv):
            return f"trim_right_ratio: {sizes.trim_right_ratio} needs use_causal_conv, and is at most 1"
        if config.get("codebook_dim") not in (None, sizes.hidden_size):
            return f"codebook_dim: {config['codebook_dim']!r} is not the hidden_size {sizes.hidden_size}"
        return None


class Encodec:
    """An EnCodec as a codec; see `erniekit.codecs.codec.Codec`.

    Without chunks, S samples have ceil(S / hop_length) frames. With chunks, the frames of all chunks follow each other,
    `chunk_frames` of each but the last; they overlap, so there are more frames per second than of one chunk.
    A model of two channels gets sound of one in both, and gives the mean of what it decodes.
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
        self.config = config = EncodecConfig.from_json(path, read_json_object(path))
        self.levels = check_levels(levels, config.num_quantizers, folder)
        self.codebook_size = config.codebook_size
        self.sampling_rate = config.sampling_rate
        self.frame_rate = config.frame_rate
        # Frames that go through the convolutions at once; None: all, because a norm over time sees the whole chunk.
        frames = max(1, PIECE_SECONDS * config.sampling_rate // config.hop_length)
        self._piece = frames if config.seanet.norm_type == "weight_norm" else None
        weights, shape = CodecWeights(folder), (config.codebook_size, config.seanet.hidden_size)
        self._encoder = read_encoder(weights, config.seanet)
        self._codebooks = [
            paddle.to_tensor(weights.take(f"quantizer.layers.{level}.codebook.embed", *shape))
            for level in range(self.levels)
        ]
        self.fingerprint = weights.fingerprint(MODEL_TYPE, asdict(config), self.levels)
        self._decoder = read_decoder(weights, config.seanet)
        weights.refuse_others(_TRAINING_STATE)

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of float32[samples].

        Raises:
            DataError: there are no samples, or they are no sound.
        """
        sound = check_recording(sound)
        codes, _ = self.encode_channels(np.broadcast_to(sound, (self.config.seanet.audio_channels, len(sound))))
        return codes

    def encode_channels(self, sound: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Encode sound of all channels of the model, and keep the loudness that codes lack.

        Args:
            sound: float32[audio_channels, samples], finite, at least one sample.

        Returns:
            Codes int32[levels, frames], and the scale of each chunk, float32[chunks], if the model normalizes.
        """
        length, stride = self.config.chunk_length or sound.shape[1], self.config.chunk_stride or sound.shape[1]
        codes, scales = [], []
        for start in range(0, sound.shape[1], stride):
            chunk = sound[:, start : start + length]
            if self.config.normalize:
                scales.append(np.sqrt(np.square(chunk.mean(0)).mean()) + np.float32(1e-8))
                chunk = chunk / scales[-1]
            codes.append(self._encode_chunk(np.ascontiguousarray(chunk, np.float32)))
        return np.concatenate(codes, 1), np.array(scales, np.float32) if scales else None

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels or fewer, frames].

        Where the model normalizes, every chunk gets a loudness of 0.1, because codes do not tell it.

        Raises:
            DataError: a code is out of range, their shape is wrong, or there are no frames.
        """
        return self.decode_channels(codes).mean(0)

    def decode_channels(self, codes: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        """Return the sound float32[audio_channels, samples] of codes int[levels or fewer, frames].

        Args:
            scales: float32[chunks], as `encode_channels` gives them.

        Raises:
            DataError: a code is out of range, their shape is wrong, there are no frames, or too few scales.
        """
        codes = check_codes(codes, self)
        if not codes.shape[1]:
            raise DataError("codes without frames have no sound")
        frames = self.config.chunk_frames or codes.shape[1]
        starts = range(0, codes.shape[1], frames)
        if not self.config.normalize:
            scales = np.ones(len(starts), np.float32)
        elif scales is None:
            scales = np.full(len(starts), LOUDNESS, np.float32)
        if len(scales) != len(starts):
            raise DataError(f"codes of {len(starts)} chunks need as many scales, not {len(scales)}")
        chunks = (
            self._decode_chunk(codes[:, start : start + frames]) * scale
            for start, scale in zip(starts, scales, strict=True)
        )
        return next(chunks) if len(starts) == 1 else _overlapped(chunks, len(starts), self.config.chunk_stride or 1)

    def _encode_chunk(self, sound: np.ndarray) -> np.ndarray:
        """Return int32[levels, frames] of float32[audio_channels, samples]."""
        hop = self.config.hop_length
        with paddle.no_grad():
            pieces = pieces_of(sound, self._piece and self._piece * hop)
            states = self._encoder.in_pieces(pieces, down=hop)
            codes = [quantize(x[0].transpose([1, 0]), self._codebooks).numpy() for x in states]
        return np.concatenate(codes, 1).astype(np.int32)

    def _decode_chunk(self, codes: np.ndarray) -> np.ndarray:
        """Return float32[audio_channels, samples] of int64[levels, frames]."""
        with paddle.no_grad():
            pieces = (dequantize(piece[0], self._codebooks) for piece in pieces_of(codes, self._piece))
            states = (piece.transpose([1, 0]).unsqueeze(0) for piece in pieces)
            sound = self._decoder.in_pieces(states, up=self.config.hop_length)
            return np.concatenate([piece.numpy()[0] for piece in sound], 1)


def _overlapped(chunks: Iterable[np.ndarray], count: int, stride: int) -> np.ndarray:
    """Return the chunks [channels, T], one every `stride` samples, added where they overlap.

    Each is weighted by a triangle over the length of the first, and the sum divided by the sum of weights.
    """
    total = weights = triangle = np.zeros(0, np.float32)
    end = 0
    for number, chunk in enumerate(chunks):
        start, length = number * stride, chunk.shape[1]
        if not number:
            times = np.linspace(0, 1, length + 2, dtype=np.float32)[1:-1]
            triangle = np.float32(0.5) - np.abs(times - np.float32(0.5))
            total = np.zeros((chunk.shape[0], stride * (count - 1) + length), np.float32)
            weights = np.zeros(total.shape[1], np.float32)
        total[:, start : start + length] += triangle[:length] * chunk
        weights[start : start + length] += triangle[:length]
        end = max(end, start + length)
    return total[:, :end] / weights[:end]
