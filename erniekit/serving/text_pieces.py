"""An answer as it grows: tokens become text as soon as it is certain, up to the first stop word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class GrowingText:
    """The text of tokens that come one by one.

    A character may take several tokens, and a token's text may depend on those before it. So the text of a few tokens
    is compared without and with the newest ones; joined, the pieces are the text of all tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self.tokens: list[int] = []
        self._first, self._shown = 0, 0  # tokens from `_first` on are decoded; those before `_shown` are told already
        self._told: list[str] = []

    def add(self, token: int) -> str:
        """Take a token; return the text that is certain now, perhaps ""."""
        self.tokens.append(token)
        before = self._decode(self.tokens[self._first : self._shown])
        text = self._decode(self.tokens[self._first :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._first, self._shown = self._shown, len(self.tokens)
        self._told.append(text[len(before) :])
        return self._told[-1]

    def rest(self) -> str:
        """Return what is left of the text when the answer has ended."""
        whole, told = self._decode(self.tokens), "".join(self._told)
        return whole[len(told) :] if whole.startswith(told) else ""


class StopWords:
    """Looks for words in a growing text, and holds back what may be the beginning of one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """Take a piece; return the text before any word that may have begun, and whether a whole word was found."""
        if not self._words:
            return piece, False
        text = self._held + piece
        found = [place for word in self._words if (place := text.find(word)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        begun = max((begun_at_end(text, word) for word in self._words), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun], False

    def rest(self) -> str:
        """Return what was held back, when nothing follows it."""
        held, self._held = self._held, ""
        return held


def begun_at_end(text: str, word: str) -> int:
    """Return how many characters at the end of a text are the beginning of a word, and not all of it."""
    return next((length for length in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:length])), 0)
