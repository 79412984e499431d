"""Text of others that must not become structure: added tokens written in it are encoded as ordinary text.

A user may write `<|im_end|>` or `<tool_call>`. A break between the characters of such a token keeps it from being found
as one. Chat templates carry breaks along like any other character, and encoding removes them. What a template writes
itself has no breaks, so it becomes the ids that it should.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

BREAK = "\ufdd0"  # a noncharacter, which Unicode reserves for a program's own use
_WRITTEN_BREAK = f"{BREAK}\ufdd1"  # what stands for the same character in a text

MAX_NESTING = 40  # of a regular expression's groups

EncodeTexts = Callable[[list[str]], list[list[int]]]


def break_inserter(tokens: Iterable[str]) -> Callable[[str], str]:
    """Return a function that puts breaks into every occurrence of `tokens` in a text."""
    pattern = longest_of(tokens)
    search = re.compile(f"(?<!{BREAK})(?:{pattern})") if pattern else None

    def insert(text: str) -> str:
        if BREAK in text:
            text = text.replace(BREAK, _WRITTEN_BREAK)
        while search is not None and search.search(text):  # breaking one token may leave another that overlapped it
            text = search.sub(lambda match: "".join(BREAK + character for character in match[0]), text)
        return text

    return insert


def longest_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of some texts at a position; "" for no text.

    It branches once for each next character, so that thousands of texts take no longer than a few.
    """
    return _branches(sorted(set(filter(None, texts))), MAX_NESTING)


def _branches(texts: list[str], depth: int) -> str:
    """Return the expression for sorted texts that are all different."""
    if depth == 0:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = []
    for _, group in groupby(texts, lambda text: text[0]):
        alike = list(group)
        ends = zip(alike[0], alike[-1], strict=False)
        same = next((place for place, (one, other) in enumerate(ends) if one != other), len(alike[0]))
        prefix = alike[0][:same]
        rest = [text[len(prefix) :] for text in alike]
        longer = _branches(rest[1:] if not rest[0] else rest, depth - 1)
        ends_here = "?" if not rest[0] else ""
        branches.append(re.escape(prefix) + (f"(?:{longer}){ends_here}" if longer else ""))
    return "|".join(branches)


def remove_breaks(text: str) -> str:
    """Return the text as its author wrote it."""
    if BREAK not in text:
        return text
    return BREAK.join(part.replace(BREAK, "") for part in text.split(_WRITTEN_BREAK))


def encode_without(ids: frozenset[int], texts: Sequence[str], encode: EncodeTexts) -> list[list[int]]:
    """Encode texts as ordinary text: none of `ids` is in the result, whatever the vocabulary and its normalizer do.

    A text from which one of them arises all the same is encoded character by character.
    """
    plain_texts = [remove_breaks(text) for text in texts]
    encoded = encode(plain_texts)
    for number, text in enumerate(plain_texts):
        if not ids.isdisjoint(encoded[number]):
            characters = [token for part in encode(list(text)) for token in part]
            encoded[number] = [token for token in characters if token not in ids]
    return encoded
