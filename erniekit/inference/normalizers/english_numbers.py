"""Write spelled-out English numbers in digits, by the rules of OpenAI's Whisper (`EnglishNumberNormalizer`).

two hundred and five -> 205        twenty twenty one -> 2021       one oh one -> 101
twenty first -> 21st               nineteen sixties -> 1960s       double five -> 55
three point five million -> 3500000    minus two -> -2             $2 and 7 cents -> $2.07
five per cent -> 5%                two and a half -> 2.5           the number 1 -> the number one
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

_UNITS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_POWERS = [
    "thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion", "septillion", "octillion",
    "nonillion", "decillion",
]  # fmt: skip

ZEROS = {"o", "oh", "zero"}
ONES = {name: number for number, name in enumerate(_UNITS, start=1)}
TENS = {name: number for number, name in zip(range(20, 100, 10), _TENS, strict=True)}
MULTIPLIERS = {"hundred": 100} | {name: 1000**power for power, name in enumerate(_POWERS, start=1)}

# A number with the ending that stays behind its digits; a word with an ending ends the number.
Suffixed = dict[str, tuple[int, str]]
_IRREGULAR_ORDINALS: Suffixed = {
    "zeroth": (0, "th"), "first": (1, "st"), "second": (2, "nd"), "third": (3, "rd"), "fifth": (5, "th"),
    "twelfth": (12, "th"),
}  # fmt: skip
_SUFFIXED_ONES: Suffixed = {
    **{"sixes" if name == "six" else f"{name}s": (number, "s") for name, number in ONES.items()},
    **_IRREGULAR_ORDINALS,
    **{
        name + ("h" if name.endswith("t") else "th"): (number, "th")
        for name, number in ONES.items()
        if number > 3 and number not in (5, 12)
    },
}
_SUFFIXED_TENS: Suffixed = {
    **{f"{name[:-1]}ies": (number, "s") for name, number in TENS.items()},
    **{f"{name[:-1]}ieth": (number, "th") for name, number in TENS.items()},
}
_SUFFIXED_MULTIPLIERS: Suffixed = {
    f"{name}{suffix}": (number, suffix) for name, number in MULTIPLIERS.items() for suffix in ("s", "th")
}
_WITHOUT_SUFFIX = {name: (number, "") for name, number in (ONES | TENS | MULTIPLIERS).items()}
_ALL_ONES = ONES.keys() | _SUFFIXED_ONES.keys()
_ALL_TENS = TENS.keys() | _SUFFIXED_TENS.keys()
_NUMBERS: Suffixed = _WITHOUT_SUFFIX | _SUFFIXED_ONES | _SUFFIXED_TENS | _SUFFIXED_MULTIPLIERS

_SIGNS = {"minus": "-", "negative": "-", "plus": "+", "positive": "+"}
_CURRENCIES = {
    "pound": "£", "pounds": "£", "euro": "€", "euros": "€", "dollar": "$", "dollars": "$", "cent": "¢", "cents": "¢",
}  # fmt: skip
_PREFIXES = {*_SIGNS.values(), *_CURRENCIES.values()}
_CONNECTING = {"and", "double", "triple", "point"}
_MAY_BE_OF_A_NUMBER = {*ZEROS, *_NUMBERS, *_SIGNS, *_CURRENCIES, *_CONNECTING, "per", "percent"}
_DIGITS_FOLLOW_POINT = {*ONES, *TENS, *ZEROS}
_IN_DIGITS = re.compile(r"^\d{1,4000}(\.\d{1,4000})?$")  # Python converts no longer ones


def numbers_as_digits(text: str) -> str:
    """Return the text, in lower case and without punctuation except `.%$¢€£`, with its numbers in digits."""
    words = _prepared(text).split()
    return _finished(" ".join(_Reader(words).read()))


class _Reader:
    """Reads words from left to right, and collects the number that they make.

    `_value` is that number so far: an integer while it may still grow by adding or multiplying, or the text of its
    digits, to which further digits are appended ("one oh one", "three point").
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._value: int | str | None = None
        self._prefix = ""  # of the next thing that is written

    def read(self) -> Iterator[str]:
        words, skip = self._words, False
        for place, word in enumerate(words):
            if skip:
                skip = False
                continue
            before = words[place - 1] if place else ""
            after = words[place + 1] if place + 1 < len(words) else ""
            if self._in_digits(word):
                yield from self._digits(word)
            elif word in ZEROS:
                self._value = f"{self._value or ''}0"
            elif word in _NUMBERS:
                yield from self._number(word, before)
            elif word in _SIGNS and self._is_of_a_number(after):
                yield from self._end()
                self._prefix = _SIGNS[word]
            elif word in _CURRENCIES and self._value is not None:
                self._prefix = _CURRENCIES[word]
                yield from self._end()
            elif self._value is not None and (word == "percent" or (word, after) == ("per", "cent")):
                yield from self._end("%")
                skip = word == "per"
            elif word in _CONNECTING and self._is_of_a_number(after):
                skip = word in ("double", "triple") and (after in ONES or after in ZEROS)
                yield from self._connecting(word, before, after)
            else:
                yield from self._plain(word)
        yield from self._end()

    def _digits(self, word: str) -> Iterator[str]:
        """Take a number that is in digits, possibly behind a sign or a currency."""
        prefix, digits = (word[0], word[1:]) if word[0] in _PREFIXES else ("", word)
        if isinstance(self._value, str) and self._value.endswith("."):
            self._value += word  # decimals, parts of an address
            return
        yield from self._end()
        self._prefix = prefix or self._prefix
        value = Fraction(digits)
        self._value = value.numerator if value.denominator == 1 else digits

    def _number(self, word: str, before: str) -> Iterator[str]:
        """Take a word for a number; one with a suffix ends it."""
        number, suffix = _NUMBERS[word]
        if word in _ALL_ONES:
            self._value = self._with_ones(number, before)
        elif word in _ALL_TENS:
            self._value = _joined(self._value, number, 100)
        else:
            yield from self._multiply(number)
        if suffix:
            yield from self._end(suffix)

    def _with_ones(self, number: int, before: str) -> int | str:
        value = self._value
        if isinstance(value, str) and before in TENS and number < 10:
            return value[:-1] + str(number)  # the zero of the tens
        if isinstance(value, int) and before in ONES:
            return f"{value}{number}"
        return _joined(value, number, 10 if number < 10 else 100)

    def _multiply(self, number: int) -> Iterator[str]:
        value = self._value
        if value is None:
            self._value = number
        elif isinstance(value, int):
            self._value = value // 1000 * 1000 + value % 1000 * number
        else:
            product = _fraction(value)
            if product is not None and (product := product * number).denominator == 1:
                self._value = product.numerator
            else:
                yield from self._end()
                self._value = number

    def _connecting(self, word: str, before: str, after: str) -> Iterator[str]:
        """Take "and", "point", "double" or "triple" before what may be a number."""
        if word == "point":
            if after in _DIGITS_FOLLOW_POINT or _IN_DIGITS.match(after):
                self._value = f"{self._value or ''}."
        elif word == "and":
            if before not in MULTIPLIERS:
                yield from self._plain(word)
        elif after in ONES or after in ZEROS:
            digits = str(ONES.get(after, 0)) * (2 if word == "double" else 3)
            self._value = f"{self._value or ''}{digits}"
        else:
            yield from self._plain(word)

    def _plain(self, word: str) -> Iterator[str]:
        yield from self._end()
        yield self._prefix + word
        self._prefix = ""

    def _end(self, suffix: str = "") -> Iterator[str]:
        """Write the number, if there is one."""
        if self._value is not None:
            yield f"{self._prefix}{self._value}{suffix}"
            self._value, self._prefix = None, ""

    def _in_digits(self, word: str) -> bool:
        return bool(_IN_DIGITS.match(word[1:] if word[0] in _PREFIXES else word))

    def _is_of_a_number(self, word: str) -> bool:
        return word in _MAY_BE_OF_A_NUMBER or bool(_IN_DIGITS.match(word))


def _joined(value: int | str | None, number: int, room: int) -> int | str:
    """Return `value` with a number that is added where it has zeros for it, and appended elsewhere."""
    if value is None:
        return number
    if isinstance(value, int) and value % room == 0:
        return value + number
    return f"{value}{number}"


def _fraction(digits: str) -> Fraction | None:
    try:
        return Fraction(digits)
    except ValueError:
        return None


def _prepared(text: str) -> str:
    """Return the text with "and a half" as "point five" behind a number, and with digits apart from letters."""
    parts = []
    *halves, last = re.split(r"\band\s+a\s+half\b", text)
    for part in halves:
        if part.strip():
            number = part.split()[-1]
            is_number = number in _DIGITS_FOLLOW_POINT or number in MULTIPLIERS
            parts += [part, "point five" if is_number else "and a half"]
    if last.strip():
        parts.append(last)
    text = re.sub(r"([a-z])([0-9])", r"\1 \2", " ".join(parts))
    text = re.sub(r"([0-9])([a-z])", r"\1 \2", text)
    return re.sub(r"([0-9])\s+(st|nd|rd|th|s)\b", r"\1\2", text)


def _finished(text: str) -> str:
    """Return the text with cents joined to their currency, and with "one" for a 1 that stands alone."""
    text = re.sub(r"([€£$])([0-9]+) (?:and )?¢([0-9]{1,2})\b", lambda m: f"{m[1]}{m[2]}.{int(m[3]):02d}", text)
    text = re.sub(r"[€£$]0.([0-9]{1,2})\b", lambda m: f"¢{int(m[1])}", text)
    return re.sub(r"\b1(s?)\b", r"one\1", text)
