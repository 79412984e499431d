"""The tokenizer backend for tokenizer.json, read by the `tokenizers` library."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Library
from tokenizers.models import Unigram

from erniekit.data.tokenizers.breaks import BREAK
from erniekit.data.tokenizers.files import TOKENIZER_FILE, AddedToken, AddedTokens, structural_tokens
from erniekit.errors import ModelFileError

_PROBE = "a"  # any text that leaves a token


class TokenizersBackend:
    """See tokenizer.Backend."""

    def __init__(self, folder: Path, template_text: str = "", declared_text: frozenset[str] = frozenset()) -> None:
        path = folder / TOKENIZER_FILE
        try:
            self._library = Library.from_buffer(path.read_bytes())
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror or error}; a model folder needs its tokenizer") from None
        except Exception as error:  # the library raises bare Exceptions from its Rust side
            raise ModelFileError(f"{path}: not a tokenizer that the tokenizers library can read: {error}") from None
        # A saved tokenizer may contain the truncation and padding of the process that saved it.
        self._library.no_truncation()
        self._library.no_padding()
        self.size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self._words = self._library.get_vocab(with_added_tokens=False)
        added = self._library.get_added_tokens_decoder()
        tokens = [
            AddedToken(token.content, number, token.special, token.lstrip, token.rstrip, token.single_word)
            for number, token in added.items()
        ]
        self.added_tokens = tuple(tokens)
        self.control_tokens = frozenset(token.content for token in tokens if token.special)
        self.structural_tokens = structural_tokens(tokens, self._words.get, template_text, declared_text)
        self._structure = AddedTokens(
            (token for token in tokens if token.content in self.structural_tokens),
            self._words.get,
            self._unknown_id(),
            template_text,
        )
        # A normalizer may turn other text into a token that is searched for behind it, or that the vocabulary holds.
        self._may_arise = self._library.normalizer is not None and any(
            token.normalized or token.content in self._words
            for token in added.values()
            if token.content in self.structural_tokens
        )
        self.files: tuple[Path, ...] = (path,)
        self.default_tokens: dict[str, str] = {}
        self.document_prefix = self._find_document_prefix()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode with several threads (one with TOKENIZERS_PARALLELISM=false)."""
        encoded = _encode(self._library, texts)
        for number, text in enumerate(texts):
            if BREAK in text or (self._may_arise and self._has_arisen(text, encoded[number])):
                chunks = self._structure.split(text)
                encoded[number] = self._structure.encode_batch([chunks], self._encode_plain)[0]
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _find_document_prefix(self) -> tuple[int, ...]:
        """Return the ids that the post-processor of tokenizer.json puts before a text."""
        encoding = self._library.encode(_PROBE, add_special_tokens=True)
        first = next((number for number, sequence in enumerate(encoding.sequence_ids) if sequence is not None), 0)
        return tuple(encoding.ids[:first])

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def _has_arisen(self, text: str, ids: Sequence[int]) -> bool:
        """Return whether more structural tokens are in the ids than are written in the text."""
        known = self._structure.structural_ids
        written = sum(isinstance(chunk, AddedToken) and chunk.id in known for chunk in self._structure.split(text))
        return sum(map(known.__contains__, ids)) != written

    def _unknown_id(self) -> int | None:
        """Return the id of characters that the vocabulary lacks."""
        model = self._library.model
        if isinstance(model, Unigram):
            return json.loads(self._library.to_str())["model"].get("unk_id")
        unknown = getattr(model, "unk_token", None)
        return self._words.get(unknown) if isinstance(unknown, str) else None

    def _encode_plain(self, texts: list[str]) -> list[list[int]]:
        return _encode(self._plain_library, texts)

    @cached_property
    def _plain_library(self) -> Library:
        """The same tokenizer, which finds no structural token in a text."""
        description = json.loads(self._library.to_str())
        kept = []
        for token in description["added_tokens"]:
            if token["content"] not in self.structural_tokens:
                kept.append(token)
            elif token["content"] not in self._words:  # it keeps its place, because the ids of the others depend on it
                kept.append({**token, "content": secrets.token_hex(16), "special": True, "normalized": False})
        description |= {"added_tokens": kept, "post_processor": None}
        return Library.from_str(json.dumps(description))


def _encode(library: Library, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in library.encode_batch_fast(list(texts), add_special_tokens=False)]
