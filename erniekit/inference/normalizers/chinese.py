"""Normalise Chinese text, which is compared character by character."""

from __future__ import annotations

import re
import unicodedata

from erniekit.inference.normalizers.basic import one_space

# Full-width forms of ASCII (U+FF01 to U+FF5E) and the ideographic space.
_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_BESIDE_HAN = re.compile(f"(?<=[{_HAN}]) +| +(?=[{_HAN}])")


def normalize(text: str) -> str:
    """Return the text with half-width forms of ASCII characters, in lower case, without punctuation and symbols, and
    without the spaces beside Chinese characters.

    A punctuation character or symbol (Unicode categories P and S) is a space first, so that words of other scripts
    around it stay apart. Digits are not turned into characters, nor traditional characters into simplified ones.
    """
    text = "".join(
        " " if unicodedata.category(character)[0] in "PS" else character
        for character in text.translate(_HALF_WIDTH).lower()
    )
    return _BESIDE_HAN.sub("", one_space(text)).strip()
