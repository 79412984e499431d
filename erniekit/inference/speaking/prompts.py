"""What stands before the codes of an utterance: the token ids of its text, language and description of a voice."""

from __future__ import annotations

from collections.abc import Callable

from erniekit.build.speech_tokens import NOT_TOLD, token_of
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError
from erniekit.inference.speaking.text import nonverbal_parts
from erniekit.model.architectures.speaking import (
    DENOISE,
    INSTRUCT_END,
    INSTRUCT_START,
    LANGUAGE_END,
    LANGUAGE_START,
    TEXT_END,
    TEXT_START,
)

Encode = Callable[[str], list[int]]


def masked_prompt(
    tokenizer: Tokenizer, encode: Encode, text: str, *, language: str = "", instruct: str = "", denoise: bool = False
) -> list[int]:
    """Return the ids before the codes of a model of masked codes; the style, then the text.

    Args:
        encode: returns the ids of a text as in training; tags such as `[laughter]` are encoded apart from it.
        denoise: the voice may be noisy, and the sound is to be clean.
    """

    def told(start: str, words: str, end: str) -> list[int]:
        ids = tokenizer.encode(tokenizer.plain_text(words or NOT_TOLD))
        return [token_of(tokenizer, start), *ids, token_of(tokenizer, end)]

    return [
        *([token_of(tokenizer, DENOISE)] if denoise else []),
        *told(LANGUAGE_START, language, LANGUAGE_END),
        *told(INSTRUCT_START, instruct, INSTRUCT_END),
        token_of(tokenizer, TEXT_START),
        *(token for part in nonverbal_parts(text) for token in encode(part)),
        token_of(tokenizer, TEXT_END),
    ]


def check_text(text: str, place: str) -> None:
    """Raise DataError for a text that cannot be spoken."""
    if not text.strip():
        raise DataError(f"{place}: expected a text to speak, got an empty one")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python reads a foreign byte as a lone surrogate
        raise DataError(
            f"{place}: the text is not UTF-8 (character {error.start + 1}); convert it, or set the terminal to UTF-8"
        ) from None
