"""Whether a tokenizer belongs to a model, and what the user tells its template about transcripts and units."""

from __future__ import annotations

import logging

from erniekit.config import Config
from erniekit.config.sections.sources import UNIT_KINDS
from erniekit.data.templates.ernie import Template
from erniekit.data.templates.mistral import MistralTemplate
from erniekit.data.templates.transcription import DEFAULT_REQUEST, LANGUAGE_FIELD, Request, Speech
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.unit_tokens import UnitTokens, unit_tokens
from erniekit.errors import ModelFileError
from erniekit.model.architectures.model_config import ModelConfig

logger = logging.getLogger(__name__)


def check_vocabulary(model_config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ModelFileError if the tokenizer has ids without an embedding in the model, or if the model's placeholder of
    recordings is a token that any text may hold."""
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens but config.json says vocab_size "
            f"{model_config.vocab_size:,}: they do not belong together"
        )
    if model_config.architecture.audio is None:
        return
    placeholder = model_config.architecture.audio(model_config).placeholder_id
    if placeholder not in map(tokenizer.token_id, tokenizer.structural_tokens):
        raise ModelFileError(
            f"config.json: token {placeholder} stands for recordings, but in the tokenizer it is "
            f"{tokenizer.decode([placeholder], skip_special_tokens=False)!r}, which is no special token: they do not "
            "belong together"
        )


def renders_dialogues(config: Config) -> bool:
    """Return whether a run needs a chat template: plain text has none, and some records hold ready tokens."""
    kinds = {*config.training.train_dataset_type}
    if config.evaluation.eval_dataset_path:
        kinds |= {*config.evaluation.eval_dataset_type}
    return config.stage.reads_dialogues and not kinds <= {*UNIT_KINDS}


def unit_tokens_of(config: Config, tokenizer: Tokenizer) -> UnitTokens:
    """Return the tokens with which units and text are interleaved.

    Raises:
        ConfigurationError: the tokenizer lacks one.
    """
    section = config.units
    return unit_tokens(tokenizer, section.unit_token, section.continue_token, section.correspond_token)


def transcription_request(config: Config) -> Request:
    """Return how the user wants transcripts to be asked for."""
    return Request(config.sft.asr_prompt, config.sft.asr_language)


def speech_of(config: Config) -> Speech:
    """Return how the user wants units of speech to stand in dialogues."""
    section = config.units
    return Speech(section.unit_token, section.correspond_token, section.dialogue_template)


def warn_of_unused_request(template: Template, request: Request) -> None:
    """Warn of a part of the user's request for transcripts that the template leaves out."""
    if isinstance(template, MistralTemplate) and request.prompt != DEFAULT_REQUEST.prompt:
        logger.warning("no effect: asr_prompt, because the request for transcripts of this model has no words")
    if not isinstance(template, MistralTemplate) and request.language and LANGUAGE_FIELD not in request.prompt:
        logger.warning(f"no effect: asr_language, because asr_prompt does not contain {LANGUAGE_FIELD}")
