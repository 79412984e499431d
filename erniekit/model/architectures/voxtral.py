"""Voxtral (Mistral AI, 2025, arXiv:2507.13264): Whisper's encoder and a projector of four states in front of a Llama.

Names and defaults are those of `VoxtralForConditionalGeneration` and its configuration in transformers 4.55.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import EncoderInput, Key, Tower
from erniekit.model.architectures.audio_encoder import (
    AUDIO_CONFIG,
    ENCODER,
    ENCODER_RULES,
    PROJECTOR,
    AudioEncoderSizes,
    audio_sizes,
    encoder_config,
    encoder_shapes,
    encoder_size_problems,
    encoder_tensor_parallel_sizes,
    with_audio_encoder,
)
from erniekit.model.architectures.llama import LLAMA
from erniekit.model.architectures.parts import ALIGNER
from erniekit.model.architectures.plain_decoder import Shapes
from erniekit.model.architectures.sharding import COLUMN_PARALLEL, ROW_PARALLEL

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.encoders.projectors import VoxtralProjector
    from erniekit.model.encoders.whisper_encoder import WhisperEncoder
    from erniekit.model.tensor_parallel import TensorParallel

TEXT = replace(
    LLAMA,
    defaults={
        **LLAMA.defaults,
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 100000000.0,
        "rms_norm_eps": 1e-5,
    },
)


def joined_states(sizes: AudioEncoderSizes) -> int:
    """Return how many states of the encoder, one after the other, the projector makes one of."""
    return max(1, sizes.intermediate_size // sizes.hidden_size)


def _window_tokens(sizes: AudioEncoderSizes) -> int:
    return sizes.max_source_positions // joined_states(sizes)


def _audio(config: ModelConfig) -> EncoderInput:
    """All states of a window count, those of the silence that fills it up as well."""
    sizes = audio_sizes(config)
    tokens = _window_tokens(sizes)
    return EncoderInput(
        config.own["audio_token_id"], sizes.num_mel_bins, sizes.window_frames, tokens, lambda frames: tokens
    )


def _problems(config: ModelConfig) -> list[str]:
    sizes, lines = audio_sizes(config), encoder_size_problems(config, "audio_token_id")
    if sizes.intermediate_size % sizes.hidden_size:
        lines.append(
            f"{AUDIO_CONFIG}.intermediate_size {sizes.intermediate_size} is not a multiple of hidden_size "
            f"{sizes.hidden_size}; the projector joins states to so many channels"
        )
    elif sizes.max_source_positions % joined_states(sizes):
        lines.append(
            f"{AUDIO_CONFIG}.max_source_positions {sizes.max_source_positions} is not a multiple of the "
            f"{joined_states(sizes)} states that the projector joins (intermediate_size / hidden_size)"
        )
    return lines


def _projector_shapes(config: ModelConfig) -> Shapes:
    sizes = audio_sizes(config)
    joined = joined_states(sizes) * sizes.hidden_size
    return {
        "linear_1.weight": (config.hidden_size, joined),
        "linear_2.weight": (config.hidden_size, config.hidden_size),
    }


_PROJECTOR_RULES = {"linear_1": COLUMN_PARALLEL, "linear_2": ROW_PARALLEL}


def _build_encoder(config: ModelConfig, tp: TensorParallel) -> WhisperEncoder:
    from erniekit.model.encoders.whisper_encoder import WhisperEncoder

    return WhisperEncoder(audio_sizes(config), tp)


def _build_projector(config: ModelConfig, tp: TensorParallel) -> VoxtralProjector:
    from erniekit.model.encoders.projectors import VoxtralProjector

    sizes = audio_sizes(config)
    return VoxtralProjector(joined_states(sizes) * sizes.hidden_size, config.hidden_size, tp)


VOXTRAL = with_audio_encoder(
    TEXT,
    "voxtral",
    "VoxtralForConditionalGeneration",
    encoder=encoder_config(
        "voxtral_encoder",
        layerdrop="layerdrop",
        inert_keys=(
            "vocab_size",  # of Whisper's decoder, which is not here
            "head_dim",  # the width of a head is hidden_size / num_attention_heads, whatever these two say
            "num_key_value_heads",
        ),
        saved_keys={"activation_function": "gelu"},
    ),
    towers=(
        Tower(ENCODER, encoder_shapes, ENCODER_RULES, _build_encoder),
        Tower(PROJECTOR, _projector_shapes, _PROJECTOR_RULES, _build_projector, part=ALIGNER),
    ),
    audio=_audio,
    problems=_problems,
    tensor_parallel_sizes=lambda config: {
        **encoder_tensor_parallel_sizes(config),
        "text_config.hidden_size": config.hidden_size,  # between the linears of the projector
    },
    own_keys={"audio_token_id": Key(int, 0, required=True)},
    neutral={"projector_hidden_act": ("gelu",)},
    saved_keys={"projector_hidden_act": "gelu"},
    inert_keys=("vocab_size", "hidden_size", "tie_word_embeddings"),  # those of `text_config` act
    copied_keys=("vocab_size", "hidden_size"),
    small_values={"audio_token_id": 5},  # a control token of the shipped tokenizer
)
