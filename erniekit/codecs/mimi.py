"""Mimi (Défossez et al., 2024, arXiv:2410.00037): SEANet, transformers and a split residual quantizer at 12.5 Hz.

Level 0 is semantic, learned from a speech model, and the others are acoustic. Sound and states are [1, channels, time].
Names of weights and of `config.json` are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.codecs.checks import check_codes, check_levels, check_recording
from erniekit.codecs.config_values import config_reader
from erniekit.codecs.mimi_transformer import TransformerSizes, read_transformer
from erniekit.codecs.seanet import SeanetSizes, read_convolution, read_decoder, read_encoder, read_transposed
from erniekit.codecs.split_quantizer import SplitQuantizerSizes, read_split_quantizer
from erniekit.codecs.stack import PIECE_SECONDS, pieces_of
from erniekit.codecs.weights import CodecWeights
from erniekit.errors import DataError, ModelFileError
from erniekit.json_files import read_json_object

MODEL_TYPE = "mimi"
_UNUSED = r"quantizer\..*"  # levels that are not used, and what is left of training


@dataclass(frozen=True)
class MimiConfig:
    """What tells one Mimi from another, as `config.json` calls it."""

    sampling_rate: int
    frame_rate: float
    upsample_groups: int
    seanet: SeanetSizes
    transformer: TransformerSizes
    quantizer: SplitQuantizerSizes

    @classmethod
    def from_json(cls, path: Path, config: Mapping[str, Any]) -> MimiConfig:
        """Read a configuration; absent keys have the values of transformers.

        Args:
            path: of the file, for messages.

        Raises:
            ModelFileError: a value is none of a Mimi.
        """
        read = config_reader(path, config)
        if read("audio_channels", 1) != 1:
            raise ModelFileError(f"{path}: audio_channels: codecs of one channel are supported")
        seanet = SeanetSizes(
            audio_channels=1,
            hidden_size=read("hidden_size", 512),
            num_filters=read("num_filters", 64),
            num_residual_layers=read("num_residual_layers", 1),
            upsampling_ratios=read("upsampling_ratios", (8, 6, 5, 4)),
            norm_type="weight_norm",
            kernel_size=read("kernel_size", 7),
            last_kernel_size=read("last_kernel_size", 3),
            residual_kernel_size=read("residual_kernel_size", 3),
            dilation_growth_rate=read("dilation_growth_rate", 2),
            use_causal_conv=read("use_causal_conv", True),
            pad_mode=read("pad_mode", "constant"),
            compress=read("compress", 2),
            num_lstm_layers=0,
            trim_right_ratio=read("trim_right_ratio", 1.0),
            use_conv_shortcut=read("use_conv_shortcut", False),
        )
        sampling_rate = read("sampling_rate", 24_000)
        values = cls(
            sampling_rate,
            frame_rate=read("frame_rate", sampling_rate / (2 * math.prod(seanet.upsampling_ratios))),
            upsample_groups=read("upsample_groups", 512),
            seanet=seanet,
            transformer=TransformerSizes.from_json(path, config, seanet.hidden_size),
            quantizer=SplitQuantizerSizes.from_json(path, config, seanet.hidden_size),
        )
        if problem := values._problem():
            raise ModelFileError(f"{path}: {problem}")
        return values

    def _problem(self) -> str | None:
        sizes = self.seanet
        if sizes.pad_mode not in ("constant", "reflect", "replicate"):
            return f"pad_mode: {sizes.pad_mode!r} is none of constant, reflect, replicate"
        if sizes.hidden_size % self.upsample_groups:
            return "upsample_groups must divide hidden_size"
        if sizes.trim_right_ratio > 1:
            return f"trim_right_ratio: expected at most 1, got {sizes.trim_right_ratio}"
        inner_rate = math.ceil(self.sampling_rate / math.prod(sizes.upsampling_ratios))
        if int(inner_rate / self.frame_rate) != 2:
            return f"frame_rate: {self.frame_rate} is not half of {inner_rate}"
        return None


class Mimi:
    """A Mimi as a codec; see `erniekit.codecs.codec.Codec`. Code [0] is the semantic level.

    A recording of S samples has ceil(S / samples of a frame) frames, and these decode to whole frames of sound.
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
        config = MimiConfig.from_json(path, read_json_object(path))
        sizes, quantizer = config.seanet, config.quantizer
        self.levels = check_levels(levels, quantizer.num_quantizers, folder)
        self.sampling_rate, self.frame_rate = config.sampling_rate, config.frame_rate
        self.codebook_size = quantizer.codebook_size
        self._hop = math.prod(sizes.upsampling_ratios)  # samples of a frame of the transformers
        self._piece = max(1, PIECE_SECONDS * config.sampling_rate // self._hop)  # of these frames
        weights, H = CodecWeights(folder), sizes.hidden_size
        self._encoder = read_encoder(weights, sizes)
        self._encoder_transformer = read_transformer(weights, "encoder_transformer", config.transformer)
        self._downsample = read_convolution(
            weights, sizes, "downsample", H, H, 4, stride=2, bias=False, mode="replicate"
        )
        self._quantizer = read_split_quantizer(weights, quantizer, self.levels)
        self.fingerprint = weights.fingerprint(MODEL_TYPE, asdict(config), self.levels)  # nothing of the decoder
        self._upsample = read_transposed(
            weights, sizes, "upsample", H, H, 4, stride=2, groups=config.upsample_groups, bias=False
        )
        self._decoder_transformer = read_transformer(weights, "decoder_transformer", config.transformer)
        self._decoder = read_decoder(weights, sizes)
        weights.refuse_others(_UNUSED)

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return the codes int32[levels, frames] of float32[samples].

        Raises:
            DataError: there are no samples, or they are no sound.
        """
        sound = check_recording(sound)
        with paddle.no_grad():
            pieces = pieces_of(sound[None], self._piece * self._hop)
            x_1CT = paddle.concat(list(self._encoder.in_pieces(pieces, down=self._hop)), 2)
            codes = self._quantizer.encode(self._downsample(self._encoder_transformer(x_1CT)))
        return codes.numpy().astype(np.int32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the sound float32[samples] of codes int[levels or fewer, frames].

        Raises:
            DataError: a code is out of range, their shape is wrong, or there are no frames.
        """
        codes = check_codes(codes, self)
        if not codes.shape[1]:
            raise DataError("codes without frames have no sound")
        with paddle.no_grad():
            x_1CT = self._upsample(self._quantizer.decode(paddle.to_tensor(codes)))
            x_1CT = self._decoder_transformer(x_1CT)
            states = (x_1CT[:, :, start : start + self._piece] for start in range(0, x_1CT.shape[2], self._piece))
            pieces = self._decoder.in_pieces(states, up=self._hop)
            return np.concatenate([piece.numpy()[0, 0] for piece in pieces])
