"""Qwen2-Audio (Chu et al., 2024, arXiv:2407.10759): Whisper's encoder, a pool and a linear in front of a Qwen2.

Names and defaults are those of `Qwen2AudioForConditionalGeneration` and its configuration in transformers 4.55; the
published files leave most keys of `text_config` out.
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
    audio_sizes,
    encoder_config,
    encoder_shapes,
    encoder_size_problems,
    encoder_tensor_parallel_sizes,
    with_audio_encoder,
)
from erniekit.model.architectures.parts import ALIGNER
from erniekit.model.architectures.plain_decoder import Shapes
from erniekit.model.architectures.qwen import QWEN2
from erniekit.model.architectures.sharding import REPLICATED_LINEAR

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.encoders.projectors import LinearProjector
    from erniekit.model.encoders.whisper_encoder import WhisperEncoder
    from erniekit.model.tensor_parallel import TensorParallel

TEXT = replace(
    QWEN2,
    defaults={
        **QWEN2.defaults,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
)
POOLED = 2  # states of the encoder, one after the other, whose mean is one token


def states_of_frames(frames: int) -> int:
    """Return how many of a window's states before the pool belong to its first `frames` frames."""
    return (frames - 1) // 2 + 1


def tokens_of_frames(frames: int) -> int:
    """Return how many tokens the first `frames` frames of a window are: 0 for 1 and 2 frames."""
    return (states_of_frames(frames) - POOLED) // POOLED + 1


def _audio(config: ModelConfig) -> EncoderInput:
    sizes = audio_sizes(config)
    tokens = sizes.max_source_positions // POOLED
    placeholder = config.own["audio_token_index"]
    return EncoderInput(placeholder, sizes.num_mel_bins, sizes.window_frames, tokens, tokens_of_frames)


def _problems(config: ModelConfig) -> list[str]:
    lines = encoder_size_problems(config, "audio_token_index")
    if audio_sizes(config).max_source_positions < POOLED:
        lines.append(f"{AUDIO_CONFIG}.max_source_positions: must be at least {POOLED}, which are pooled, got 1")
    return lines


def _projector_shapes(config: ModelConfig) -> Shapes:
    return {
        "linear.weight": (config.hidden_size, audio_sizes(config).hidden_size),
        "linear.bias": (config.hidden_size,),
    }


def _build_encoder(config: ModelConfig, tp: TensorParallel) -> WhisperEncoder:
    from erniekit.model.encoders.whisper_encoder import WhisperEncoder

    return WhisperEncoder(audio_sizes(config), tp, pooled=POOLED, states_of_frames=states_of_frames)


def _build_projector(config: ModelConfig, tp: TensorParallel) -> LinearProjector:
    from erniekit.model.encoders.projectors import LinearProjector

    return LinearProjector(audio_sizes(config).hidden_size, config.hidden_size)


QWEN2_AUDIO = with_audio_encoder(
    TEXT,
    "qwen2_audio",
    "Qwen2AudioForConditionalGeneration",
    encoder=encoder_config(
        "qwen2_audio_encoder",
        {
            "hidden_size": "d_model",
            "intermediate_size": "encoder_ffn_dim",
            "num_hidden_layers": "encoder_layers",
            "num_attention_heads": "encoder_attention_heads",
        },
        layerdrop="encoder_layerdrop",
        inert_keys=("init_std",),  # of random weights
        aliases={"num_hidden_layers": "encoder_layers"},
        saved_keys={"activation_function": "gelu"},
    ),
    towers=(
        Tower(ENCODER, encoder_shapes, ENCODER_RULES, _build_encoder),
        Tower(PROJECTOR, _projector_shapes, {"linear": REPLICATED_LINEAR}, _build_projector, part=ALIGNER),
    ),
    audio=_audio,
    problems=_problems,
    tensor_parallel_sizes=encoder_tensor_parallel_sizes,
    own_keys={"audio_token_index": Key(int, 0, default=151646)},
    aliases={"audio_token_id": "audio_token_index"},
    inert_keys=(
        "vocab_size",  # those of `text_config` act
        "hidden_size",
        "tie_word_embeddings",
        "ignore_index",  # of labels, which are the run's
    ),
    copied_keys=("vocab_size",),
    small_values={"audio_token_index": 5},  # a control token of the shipped tokenizer
)
