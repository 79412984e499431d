"""Finding added tokens in a text, as transformers' slow tokenizers do, around any vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from erniekit.data.tokenizer_files import AddedToken

TextChunk = str | AddedToken


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

    def split(self, text: str) -> list[TextChunk]:
        """The text as tokens and as the stretches between them; no stretch is empty."""
        if self._pattern is None:
            return [text] if text else []
        chunks = self._pattern.split(text)  # stretches at even places, tokens at odd ones
        for index in range(1, len(chunks), 2):
            token = self.by_text[chunks[index]]
            if token.rstrip:
                chunks[index + 1] = chunks[index + 1].lstrip()
            if token.lstrip:
                chunks[index - 1] = chunks[index - 1].rstrip()
            before, after = chunks[index - 1], chunks[index + 1]
            if token.single_word and ((before and before[-1] != " ") or (after and after[0] != " ")):
                return self._merge_into_word(chunks, index)
        return [self.by_text[chunk] if index % 2 else chunk for index, chunk in enumerate(chunks) if chunk]

    def _merge_into_word(self, chunks: list[str], index: int) -> list[TextChunk]:
        """The parts, where the token at `place` stands inside a word and belongs to it."""
        word = "".join(chunks[index - 1 : index + 2])
        before: list[TextChunk] = [
            self.by_text[chunk] if i % 2 else chunk for i, chunk in enumerate(chunks[: index - 1])
        ]
        rest = self.split("".join(chunks[index + 2 :]))
        return [chunk for chunk in (*before, word, *rest) if chunk]

    def encode_batch(
        self, chunked_texts: Sequence[Sequence[TextChunk]], encode: Callable[[list[str]], list[list[int]]]
    ) -> list[list[int]]:
        """Ids of texts that were split; `encode` gives those of the stretches between added tokens, in one call."""
        encoded_chunks = iter(encode([chunk for chunks in chunked_texts for chunk in chunks if isinstance(chunk, str)]))
        return [
            [number for chunk in chunks for number in (next(encoded_chunks) if isinstance(chunk, str) else (chunk.id,))]
            for chunks in chunked_texts
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
        pending: list[int] = []
        for number in ids:
            token = tokens.get(number)
            if token is None:
                pending.append(number)
                continue
            if pending:
                texts.append(decode(pending))
                pending = []
            if not (skip_special_tokens and token.special):
                texts.append(token.content)
        if pending:
            texts.append(decode(pending))
        return "".join(texts)
