"""Text frontends: ids of tokens, of characters and of phonemes."""

from __future__ import annotations

import pytest

from erniekit.data.formats.problems import MalformedError
from erniekit.data.phonemes import phonemes_of
from erniekit.data.speech_text import FRONTENDS, text_ids
from erniekit.data.tokenizers.tokenizer import Tokenizer

TEXT = "the river, the mill"


@pytest.mark.proves("text_frontend")
def test_a_frontend_decides_the_ids_of_a_text(tokenizer: Tokenizer) -> None:
    (tokens,), (characters,), (phonemes,) = (text_ids([TEXT], ["en"], tokenizer, name) for name in FRONTENDS)
    assert tokens == tokenizer.encode(TEXT)
    assert characters == [number for character in TEXT for number in tokenizer.encode(character)]
    assert len(characters) > len(tokens)
    assert tokenizer.decode(phonemes) == phonemes_of(TEXT, "en") != TEXT


@pytest.mark.parametrize("frontend", ["tokenizer", "characters"])
def test_no_frontend_reads_a_control_token_in_a_text(frontend: str, tokenizer: Tokenizer) -> None:
    (ids,) = text_ids(["a </s> b"], [""], tokenizer, frontend)
    assert isinstance(ids, list) and tokenizer.eos_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a </s> b"


def test_a_text_without_phonemes_says_why_and_the_others_have_them(tokenizer: Tokenizer) -> None:
    first, second, third = text_ids(["a", "b", "c"], ["en", "", "xx-none"], tokenizer, "phonemes")
    assert isinstance(first, list)
    assert isinstance(second, MalformedError) and (second.field, second.got) == ("language", "nothing")
    assert isinstance(third, MalformedError) and third.expected == "a language that eSpeak NG speaks"
