"""Finding added tokens in a text, as transformers' slow tokenizers do, around any vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from erniekit.data.tokenizer_files import AddedToken

Part = str | AddedToken


class AddedTokens:
    """The added tokens of a folder, and what tokenising means around them.

    Attributes:
        by_text, by_id: the tokens.
        special: the texts of those that steer the model.
    """

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self.by_text = {token.content: token for token in tokens}
        self.by_id = {token.id: token for token in self.by_text.values()}
        self.special = frozenset(text for text, token in self.by_text.items() if token.special)
        # at one place the longest token wins
        ordered = sorted(filter(None, self.by_text), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None

    def split(self, text: str) -> list[Part]:
        """The text as tokens and as the stretches between them; no stretch is empty."""
        if self._pattern is None:
            return [text] if text else []
        parts = self._pattern.split(text)  # stretches at even places, tokens at odd ones
        for place in range(1, len(parts), 2):
            token = self.by_text[parts[place]]
            if token.rstrip:
                parts[place + 1] = parts[place + 1].lstrip()
            if token.lstrip:
                parts[place - 1] = parts[place - 1].rstrip()
            before, after = parts[place - 1], parts[place + 1]
            if token.single_word and ((before and before[-1] != " ") or (after and after[0] != " ")):
                return self._joined(parts, place)
        return [self.by_text[part] if place % 2 else part for place, part in enumerate(parts) if part]

    def _joined(self, parts: list[str], place: int) -> list[Part]:
        """The parts, where the token at `place` stands inside a word and belongs to it."""
        word = "".join(parts[place - 1 : place + 2])
        before: list[Part] = [self.by_text[part] if at % 2 else part for at, part in enumerate(parts[: place - 1])]
        rest = self.split("".join(parts[place + 2 :]))
        return [part for part in (*before, word, *rest) if part]

    def encode_batch(
        self, parts_of_texts: Sequence[Sequence[Part]], encode: Callable[[list[str]], list[list[int]]]
    ) -> list[list[int]]:
        """Ids of texts that were split; `encode` gives those of the stretches between added tokens, in one call."""
        stretches = iter(encode([part for parts in parts_of_texts for part in parts if isinstance(part, str)]))
        return [
            [number for part in parts for number in (next(stretches) if isinstance(part, str) else (part.id,))]
            for parts in parts_of_texts
        ]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool,
        decode: Callable[[list[int]], str],
        verbatim: Mapping[int, AddedToken] | None = None,
    ) -> str:
        """The text of ids: added tokens as they are written, and `decode` for each run of others between them."""
        tokens = self.by_id if verbatim is None else verbatim
        texts: list[str] = []
        run: list[int] = []
        for number in ids:
            token = tokens.get(number)
            if token is None:
                run.append(number)
                continue
            if run:
                texts.append(decode(run))
                run = []
            if not (skip_special_tokens and token.special):
                texts.append(token.content)
        if run:
            texts.append(decode(run))
        return "".join(texts)
