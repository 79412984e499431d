"""Build how records become samples that differ from epoch to epoch: codes are drawn, speech and text interleaved."""

from __future__ import annotations

from collections.abc import Sequence

from erniekit.build.checks import read_local_model
from erniekit.build.speech import CodecFacts, codec_of_run, no_codec, trained_levels
from erniekit.build.speech_tokens import SpeechTokens, style_tokens
from erniekit.build.tokenizer import unit_tokens_of
from erniekit.config import Config
from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.conversation import Source
from erniekit.data.drawing import Drawing
from erniekit.data.interleave import Interleaving
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.speech_samples import SpeechSettings
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import ALIGNED_UNITS
from erniekit.errors import ConfigurationError
from erniekit.hub.download import model_folder
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import OMNIVOICE, CodeLayout, code_layout


def drawing_of(config: Config, tokenizer: Tokenizer, sources: Sequence[Source]) -> Drawing | None:
    """Return how the records of a run become samples that differ from epoch to epoch; None: they do not differ.

    Raises:
        UserError: the codec is not here, or the tokenizer lacks a token.
    """
    if config.stage.reads_codes:
        return code_drawing(config, read_local_model(config, model_folder(config)), tokenizer)
    aligned = any(source.kind == ALIGNED_UNITS for source in sources)
    return interleaving_of(config, tokenizer) if aligned else None


def interleaving_of(config: Config, tokenizer: Tokenizer) -> Interleaving:
    """Return how records of aligned units become samples.

    Raises:
        ConfigurationError: the tokenizer has no tokens of units.
    """
    section = config.units
    rate = section.units_per_second
    return Interleaving(
        unit_tokens_of(config, tokenizer),
        units_per_second=rate,
        segment_units=rate * section.interleave_segment_seconds,
        text_probability=section.interleave_text_probability,
        correspond_probability=section.interleave_correspond_probability,
        seed=config.training.seed,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        max_seq_len=config.training.max_seq_len,
        truncates=config.sft.over_length_policy == "truncate_turns",
    )


def code_drawing(config: Config, model: ModelConfig, tokenizer: Tokenizer) -> MaskedCodes | ArNarCodes:
    """Return how the recordings as codes of a run become samples.

    Args:
        model: one that writes codes.
        tokenizer: with the control tokens of its family.

    Raises:
        UserError: the codec is not here, or the tokenizer lacks a token.
    """
    codec, layout = codec_of_run(config), code_layout(model)
    if not codec.frame_rate:
        raise ConfigurationError(no_codec(config))
    build = _masked if layout.kind == OMNIVOICE else _ar_nar
    return build(config, codec, layout, tokenizer)


def _masked(config: Config, codec: CodecFacts, layout: CodeLayout, tokenizer: Tokenizer) -> MaskedCodes:
    section = config.speech
    assert layout.mask_id is not None
    return MaskedCodes(
        levels=layout.levels,
        codebook_size=layout.codebook_size,
        mask_id=layout.mask_id,
        frame_rate=codec.frame_rate,
        seed=config.training.seed,
        mask_ratio=_pair(section.code_mask_ratio),
        prompt_ratio=_pair(section.code_prompt_ratio),
        condition_dropout=section.condition_dropout,
        language=section.language_probability,
        instruct=section.instruct_probability,
        only_instruct=section.only_instruct_probability,
        pinyin=section.pinyin_probability,
        tokens=style_tokens(tokenizer),
        max_seq_len=config.training.max_seq_len,
    )


def _ar_nar(config: Config, codec: CodecFacts, layout: CodeLayout, tokenizer: Tokenizer) -> ArNarCodes:
    section, tokens = config.speech, SpeechTokens.of(tokenizer, layout.levels)
    assert layout.written is not None
    text_loss, prompt_loss, _ = section.loss_factors
    others, similar, own = section.prompt_sources

    return ArNarCodes(
        levels=layout.levels,
        codebook_size=layout.codebook_size,
        frame_rate=codec.frame_rate,
        seed=config.training.seed,
        tasks=section.tts_tasks,
        level_weights=trained_levels(config, layout.levels),
        prompt_seconds=_pair(section.prompt_seconds),
        prompt_sources=(others, similar, own),
        prompt_utterances=section.prompt_utterances,
        condition_dropout=section.condition_dropout,
        prompt_dropout=section.prompt_dropout,
        language=section.language_probability,
        text_loss=text_loss > 0,
        prompt_loss=prompt_loss > 0,
        both_ways=layout.both_ways,
        restarts_positions=layout.restarts_positions,
        separator=tokens.separator,
        level_ids=tokens.levels,
        task_ids=tuple(tokens.tasks.items()),
        text_ends=tokens.text,
        language_ends=tokens.language,
        prompt_rows=layout.prompts,
        written_row=layout.written,
        whole_rows=layout.whole,
        max_seq_len=config.training.max_seq_len,
        space=tuple(tokenizer.encode(" ")) if section.text_frontend != "phonemes" else (),
    )


def speech_settings_of(config: Config, drawing: MaskedCodes | ArNarCodes) -> SpeechSettings:
    """Return what records as codes must be like."""
    shortest, longest = config.codes.duration_range
    return SpeechSettings(
        drawing.levels,
        drawing.codebook_size,
        drawing.frame_rate,
        config.speech.text_frontend,
        shortest,
        longest,
        needs_text=config.speech.condition_dropout < 1,
    )


def _pair(values: tuple[float, ...]) -> tuple[float, float]:
    smallest, largest = values
    return smallest, largest
