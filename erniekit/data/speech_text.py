"""How a text that is spoken becomes token ids: the frontends of stage TTS, for training and speaking alike.

| frontend | ids |
|---|---|
| `tokenizer` | those of the model's tokenizer |
| `characters` | those of each character, encoded alone: none is merged with its neighbours |
| `phonemes` | those of each character of the text's phonemes, and of its punctuation |

No frontend reads a control token in a text: what looks like one is encoded as ordinary characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from erniekit.data.formats.problems import MalformedError
from erniekit.data.phonemes import phonemes_of
from erniekit.data.tokenizers.breaks import BREAK
from erniekit.data.tokenizers.tokenizer import Tokenizer

FRONTENDS = TOKENIZER, CHARACTERS, PHONEMES = "tokenizer", "characters", "phonemes"


def text_ids(
    texts: Sequence[str], languages: Sequence[str], tokenizer: Tokenizer, frontend: str
) -> list[list[int] | MalformedError]:
    """Return the token ids of each text, or why it has none.

    Args:
        languages: of each text, such as en; "": not known. Only phonemes ask for it.
        frontend: one of FRONTENDS.

    Raises:
        ConfigurationError: phonemes are asked for, and eSpeak NG is not installed.
    """
    if frontend == TOKENIZER:
        return list(tokenizer.encode_batch([tokenizer.plain_text(text) for text in texts]))
    if frontend == CHARACTERS:
        return list(_by_character(texts, tokenizer))
    spelled = [_phonemes(text, language) for text, language in zip(texts, languages, strict=True)]
    ids = iter(_by_character([text for text in spelled if isinstance(text, str)], tokenizer))
    return [next(ids) if isinstance(text, str) else text for text in spelled]


def writes_control_token(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text holds what looks like a control token."""
    return BREAK in tokenizer.plain_text(text)


def _phonemes(text: str, language: str) -> str | MalformedError:
    try:
        return phonemes_of(text, language)
    except MalformedError as error:
        return error


def _by_character(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    distinct = sorted({*chain.from_iterable(texts)})
    known = dict(zip(distinct, tokenizer.encode_batch([tokenizer.plain_text(each) for each in distinct]), strict=True))
    return [[number for character in text for number in known[character]] for text in texts]
