"""Whisper's audio encoder in front of a decoder: its keys, weights and rules. Needs neither Paddle nor NumPy.

Radford et al., 2022, arXiv:2212.04356. `encoders/whisper_encoder.py` computes it, and `voxtral.py` and `qwen2_audio.py`
put it, with a projector of their own, in front of a decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from erniekit.model.architectures.architecture import Architecture, EncoderConfig, EncoderInput, Key, Tower
from erniekit.model.architectures.plain_decoder import Shapes
from erniekit.model.architectures.sharding import COLUMN_PARALLEL, NORM, ROW_PARALLEL, ModuleRule

if TYPE_CHECKING:
    import numpy as np
    from paddle import Tensor

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder

AUDIO_CONFIG = "audio_config"
ENCODER, PROJECTOR = "audio_tower.", "multi_modal_projector."
FRAMES_PER_STATE = 2  # the second convolution's stride
KERNEL = 3  # of both convolutions


class AudioEncoderSizes(NamedTuple):
    """The shape of an audio encoder.

    Attributes:
        hidden_size: H, the channels of its states.
        intermediate_size: those between the two linears of an MLP.
        num_mel_bins: M, the channels of the log-mel spectrogram.
        max_source_positions: S, the states of a window before a projector or a pool joins them.
    """

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_attention_heads: int = 20
    num_mel_bins: int = 128
    max_source_positions: int = 1500

    @property
    def window_frames(self) -> int:
        return self.max_source_positions * FRAMES_PER_STATE


SMALL_SIZES = AudioEncoderSizes(
    hidden_size=32,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_mel_bins=16,
    max_source_positions=40,
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu",),
    "scale_embedding": (False,),
    "dropout": (0, 0.0),
    "attention_dropout": (0, 0.0),
    "activation_dropout": (0, 0.0),
}
_INERT = ("initializer_range",)  # random weights have the one of `text_config`


def encoder_config(
    model_type: str,
    key_names: Mapping[str, str] | None = None,
    *,
    layerdrop: str,
    inert_keys: tuple[str, ...] = (),
    saved_keys: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> EncoderConfig:
    """Return how a family writes its `audio_config`; absent keys have the values of Whisper large v3.

    Args:
        key_names: the keys that have other names than the fields of `AudioEncoderSizes`.
        layerdrop: the key of the probability to skip a layer in training, which must be 0.
    """
    defaults = AudioEncoderSizes._field_defaults
    most = dict.fromkeys(defaults, 2**20) | {"num_hidden_layers": 2_000}
    return EncoderConfig(
        model_type,
        AudioEncoderSizes,
        keys={name: Key(int, 1, default=default, most=most[name]) for name, default in defaults.items()},
        key_names=key_names or {},
        aliases=aliases or {},
        neutral={**_NEUTRAL, layerdrop: (0, 0.0)},
        inert_keys=(*_INERT, *inert_keys),
        saved_keys=saved_keys or {},
    )


def audio_sizes(config: ModelConfig) -> AudioEncoderSizes:
    """Return the shape of the audio encoder of a model that has one."""
    sizes: AudioEncoderSizes = config.own[AUDIO_CONFIG]
    return sizes


def sinusoids(shape: tuple[int, ...]) -> np.ndarray:
    """Return Whisper's position embeddings, float32 [S, H]: sines, then cosines, of H / 2 wavelengths from 2 pi to
    10000 x 2 pi.

    Random models have them times `initializer_range`: beside the full amplitude the first convolutions are faint.
    """
    import numpy as np

    length, channels = shape
    rates = np.exp(-np.log(10000.0) * np.arange(channels // 2) / max(1, channels // 2 - 1))
    angles = np.arange(length)[:, None] * rates
    values = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(values, ((0, 0), (0, channels % 2))).astype(np.float32)


_WITH_BIAS = ("weight", "bias")
LAYER_NORM = replace(NORM, parameters=_WITH_BIAS)
_CONVOLUTION = ModuleRule("other", _WITH_BIAS)
ENCODER_RULES = {
    "conv1": _CONVOLUTION,
    "conv2": _CONVOLUTION,
    "embed_positions": ModuleRule("other", initial=sinusoids, trained=False),
    "layers.{block}.self_attn_layer_norm": LAYER_NORM,
    "layers.{block}.self_attn.q_proj": COLUMN_PARALLEL,
    "layers.{block}.self_attn.k_proj": COLUMN_PARALLEL,
    "layers.{block}.self_attn.v_proj": COLUMN_PARALLEL,
    "layers.{block}.self_attn.out_proj": ROW_PARALLEL,
    "layers.{block}.final_layer_norm": LAYER_NORM,
    "layers.{block}.fc1": COLUMN_PARALLEL,
    "layers.{block}.fc2": ROW_PARALLEL,
    "layer_norm": LAYER_NORM,
}


def encoder_shapes(config: ModelConfig) -> Shapes:
    """Return the weights of the encoder by name, and their shapes as files have them."""
    sizes = audio_sizes(config)
    hidden, inner = sizes.hidden_size, sizes.intermediate_size

    def with_bias(name: str, *shape: int) -> Shapes:
        return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}

    shapes: Shapes = {
        **with_bias("conv1", hidden, sizes.num_mel_bins, KERNEL),
        **with_bias("conv2", hidden, hidden, KERNEL),
        "embed_positions.weight": (sizes.max_source_positions, hidden),
    }
    for layer in range(sizes.num_hidden_layers):
        path = f"layers.{layer}."
        shapes |= {
            **with_bias(f"{path}self_attn_layer_norm", hidden),
            **with_bias(f"{path}self_attn.q_proj", hidden, hidden),
            f"{path}self_attn.k_proj.weight": (hidden, hidden),
            **with_bias(f"{path}self_attn.v_proj", hidden, hidden),
            **with_bias(f"{path}self_attn.out_proj", hidden, hidden),
            **with_bias(f"{path}final_layer_norm", hidden),
            **with_bias(f"{path}fc1", inner, hidden),
            **with_bias(f"{path}fc2", hidden, inner),
        }
    return shapes | with_bias("layer_norm", hidden)


def encoder_size_problems(config: ModelConfig, placeholder_key: str) -> list[str]:
    """Return a line for each size of the encoder that cannot be used, and for a placeholder that is no token.

    Args:
        placeholder_key: the key of the placeholder's id.
    """
    sizes, lines = audio_sizes(config), []
    if sizes.hidden_size % sizes.num_attention_heads:
        lines.append(
            f"{AUDIO_CONFIG}: the {sizes.hidden_size} channels of the encoder are not a multiple of its "
            f"{sizes.num_attention_heads} attention heads"
        )
    if config.own[placeholder_key] >= config.vocab_size:
        lines.append(
            f"{placeholder_key}: {config.own[placeholder_key]} is none of the {config.vocab_size} tokens of text_config"
        )
    return lines


def encoder_tensor_parallel_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of the encoder that the tensor-parallel degree must divide, by name."""
    sizes = audio_sizes(config)
    return {
        f"{AUDIO_CONFIG}: attention heads": sizes.num_attention_heads,
        f"{AUDIO_CONFIG}: channels of the MLP": sizes.intermediate_size,
    }


def embed_audio(decoder: Decoder, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings [B, S, H] of the tokens, with the encoder's states where `audio_states` says so.

    Args:
        inputs: `input_ids` [B, S], and of batches with recordings `audio_features` [A, M, T], `audio_frames` [A] and
            `audio_states` [B, S], an index into the states of all A windows, or -1.
    """
    from erniekit.model.encoders.placing import place_states

    text = decoder.config.architecture.text
    assert text is not None
    return place_states(decoder, text.embed(decoder, inputs), inputs)


def with_audio_encoder(
    text: Architecture,
    model_type: str,
    transformers_class: str,
    *,
    encoder: EncoderConfig,
    towers: tuple[Tower, Tower],
    audio: Callable[[ModelConfig], EncoderInput],
    problems: Callable[[ModelConfig], list[str]],
    tensor_parallel_sizes: Callable[[ModelConfig], dict[str, int]],
    small_values: Mapping[str, Any],
    **around: Any,
) -> Architecture:
    """Return the family of an audio encoder and a projector in front of a decoder of the family `text`.

    Weights have the names of `transformers`: those of the decoder begin with `language_model.`.

    Args:
        text: its `defaults` are those of keys that `text_config` leaves out.
        problems: as of `Architecture`, of the encoder.
        tensor_parallel_sizes, small_values: as of `Architecture`, of the encoder and the projector.
        around: attributes of the keys around `text_config`.
    """
    return replace(
        text,
        model_type=model_type,
        transformers_class=transformers_class,
        **{"aliases": {}, "neutral": {}, "inert_keys": (), "saved_keys": {}, **around},
        problems=lambda config: [f"text_config.{line}" for line in text.problems(config)] + problems(config),
        small_values={**text.small_values, **small_values, AUDIO_CONFIG: SMALL_SIZES},
        text=text,
        encoders={AUDIO_CONFIG: encoder},
        decoder_prefix="language_model.",
        stores_tied_head=True,
        towers=towers,
        tensor_parallel_sizes=lambda config: {
            **{f"text_config.{name}": size for name, size in text.tensor_parallel_sizes(config).items()},
            **tensor_parallel_sizes(config),
        },
        paddle_files=None,
        input_names=("input_ids", "audio_features", "audio_frames", "audio_states"),
        embed=embed_audio,
        audio=audio,
    )
