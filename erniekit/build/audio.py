"""What a model that hears takes beside its weights: the request for a transcript."""

from __future__ import annotations

import logging

from erniekit.config import Config
from erniekit.data.templates.ernie import Template
from erniekit.data.templates.mistral import MistralTemplate
from erniekit.data.templates.transcription import DEFAULT_REQUEST, LANGUAGE_FIELD, Request

logger = logging.getLogger(__name__)


def transcription_request(config: Config) -> Request:
    """Return how the user wants transcripts to be asked for."""
    return Request(config.sft.asr_prompt, config.sft.asr_language)


def warn_of_unused_request(template: Template, request: Request) -> None:
    """Warn of a part of the user's request for transcripts that the template leaves out."""
    if isinstance(template, MistralTemplate) and request.prompt != DEFAULT_REQUEST.prompt:
        logger.warning("no effect: asr_prompt, because the request for transcripts of this model has no words")
    if not isinstance(template, MistralTemplate) and request.language and LANGUAGE_FIELD not in request.prompt:
        logger.warning(f"no effect: asr_language, because asr_prompt does not contain {LANGUAGE_FIELD}")
