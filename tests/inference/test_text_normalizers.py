"""The values of `text_normalizer`; tests/parity compares them with Whisper's on many more texts."""

from __future__ import annotations

import pytest

from erniekit.inference.normalizers import text_normalizer

# text -> what Whisper's normalisers make of it, as transformers 4.55 computes it
BASIC = {
    "Hello,  World!": "hello world ",
    "It's [noise] 3.5 kg (he said)": "it s 3 5 kg ",
    "Ça va? Ｆｕｌｌ　ｗｉｄｔｈ": "ça va full width",
    "e\u0301té <unk> ok": "été ok",
    "": "",
}
ENGLISH = {
    "Mr. Smith won't pay $2 million, uh, in the nineteen sixties": ("mister smith will not pay $2000000 in the 1960s"),
    "Twenty-one dollars and five cents": "$21.05",
    "It's the twenty first colour": "it is the 21st color",
    "two and a half per cent": "2.5%",
    "one oh one; double five seven": "101557",
    "he's got one, she's been there": "he has got one she has been there",
    "minus three point five million": "-3500000",
    "naïve café": "naive cafe",
    "and a half cup": " cup".strip(),
}
CHINESE = {
    "今天，天气 很好。": "今天天气很好",
    "用 ERNIE 4.5 训练，Ｍｏｄｅｌ！": "用ernie 4 5训练model",
    "Hello　World，你好": "hello world你好",
    "𠮷 野家〇": "𠮷野家〇",
    "。！": "",
}


@pytest.mark.parametrize(("text", "expected"), BASIC.items())
def test_basic(text: str, expected: str) -> None:
    assert text_normalizer("basic")(text) == expected


@pytest.mark.parametrize(("text", "expected"), ENGLISH.items())
def test_english(text: str, expected: str) -> None:
    assert text_normalizer("english")(text).strip() == expected


@pytest.mark.parametrize(("text", "expected"), CHINESE.items())
def test_chinese(text: str, expected: str) -> None:
    assert text_normalizer("chinese")(text) == expected


def test_none_changes_nothing() -> None:
    assert text_normalizer("none")(" It's 3,5! ") == " It's 3,5! "


def test_a_number_of_any_length_is_read() -> None:
    """Python converts no integer of more than 4,300 digits."""
    assert text_normalizer("english")("9" * 9000) == "9" * 9000
